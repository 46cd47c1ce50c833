//! Delegation: operations and sizes that the user gives to another library with NCCL's interface.
//!
//! `CROSSWEFT_NCCL_DELEGATE` has the rules, `CROSSWEFT_NCCL_LIB` the library. Every communicator then has one of the library's
//! beside it, whose unique id its ranks exchange here. Ranks with different rules, or libraries of different versions, are
//! told so when the communicator is made. What is delegated is said on standard error, and counted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossweft_collective::{Collective, Communicator, DataType, ReduceOp};

use crate::call::{Buffers, CollectiveCall, Reduction, data_type, reduce_op};
use crate::library::{Arguments, Handle, Library, Returned};
use crate::pointer::Destination;
use crate::settings;
use crate::status::{Error, Status};

/// The name of communicators that delegates make, which delegate nothing themselves: the other library may be a copy of
/// this one, with the same environment.
pub(crate) const NAME: &std::ffi::CStr = c"delegated by crossweft";

/// What can be delegated. Roots are of no account.
const OPERATIONS: [Collective; 9] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Broadcast { root: 0 },
    Collective::Reduce { root: 0 },
    Collective::Gather { root: 0 },
    Collective::Scatter { root: 0 },
    Collective::SendRecv,
];

/// Messages of one operation, from one size to below another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    operation: Collective,
    from: u64,
    below: Option<u64>,
}

/// All rules; the first that holds counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules(Vec<Rule>);

impl Rule {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, range) = match text.split_once(':') {
            Some((name, range)) => (name, Some(range)),
            None => (text, None),
        };
        let mut operations = OPERATIONS.into_iter();
        let Some(operation) = operations.find(|operation| operation.name() == name.trim()) else {
            let names = OPERATIONS.map(Collective::name).join(", ");
            return Err(format!(
                "there is no operation `{}`; there are {names}",
                name.trim()
            ));
        };
        let (mut from, mut below) = (0, None);
        if let Some(range) = range {
            let Some((least, limit)) = range.split_once('-') else {
                return Err(format!(
                    "`{range}` is no range of sizes; it must be FROM-, -BELOW or FROM-BELOW, as in 64K-1M"
                ));
            };
            let given = |text: &str| match text.trim() {
                "" => Ok(None),
                text => size(text).map(Some),
            };
            from = given(least)?.unwrap_or(0);
            below = given(limit)?;
        }
        if below.is_some_and(|below| below <= from) {
            return Err(format!("no size is in the range of `{text}`"));
        }
        Ok(Self {
            operation,
            from,
            below,
        })
    }

    fn holds(&self, operation: Collective, bytes: u64) -> bool {
        let large_enough = self.from <= bytes;
        self.operation.name() == operation.name()
            && large_enough
            && self.below.is_none_or(|below| bytes < below)
    }
}

/// Bytes, with K, M and G for powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 1 << 10),
        Some(digits) if text.ends_with('M') => (digits, 1 << 20),
        Some(digits) => (digits, 1 << 30),
        None => (text, 1),
    };
    let number = digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor));
    number.ok_or_else(|| format!("`{text}` is no size; it must be as 4096, 64K, 1M or 2G"))
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.operation.name())?;
        match (self.from, self.below) {
            (0, None) => Ok(()),
            (from, None) => write!(f, ":{from}-"),
            (from, Some(below)) => write!(f, ":{from}-{below}"),
        }
    }
}

impl Rules {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let rules = text
            .split(',')
            .map(str::trim)
            .filter(|rule| !rule.is_empty());
        let rules = rules.map(Rule::parse).collect::<Result<_, _>>();
        rules
            .map(Self)
            .map_err(|why| Error::usage(format!("CROSSWEFT_NCCL_DELEGATE: {why}")))
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&words.join(","))
    }
}

/// A message to a rank, or from one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) peer: u32,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) stream: u64,
}

impl Message {
    /// From an address on.
    pub(crate) fn send(peer: u32, address: u64, bytes: usize, stream: u64) -> Self {
        let sends = true;
        Self {
            sends,
            peer,
            address,
            bytes,
            stream,
        }
    }

    pub(crate) fn receive(peer: u32, data: &Destination, stream: u64) -> Self {
        Self {
            sends: false,
            peer,
            address: data.range().start,
            bytes: data.len(),
            stream,
        }
    }
}

/// A library with rules for it, before a communicator is made.
#[derive(Debug)]
pub(crate) struct Plan {
    rules: Rules,
    library: Library,
    version: i32,
}

impl Plan {
    /// What the environment says; `None` if nothing is delegated. Local.
    pub(crate) fn of_environment() -> Result<Option<Self>, Error> {
        let Some((path, rules)) = settings::delegation()? else {
            return Ok(None);
        };
        let library = Library::load(&path)?;
        rules
            .0
            .iter()
            .try_for_each(|rule| library.offers(rule.operation))?;
        let version = library.version()?;
        Ok(Some(Self {
            rules,
            library,
            version,
        }))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rules, version, .. } = self;
        write!(f, "{rules} delegated to NCCL version {version}")
    }
}

/// The other library's communicator of the same ranks.
#[derive(Debug)]
pub(crate) struct Delegate {
    communicator: Communicator,
    rules: Rules,
    library: Library,
    /// `None` once it has ended.
    comm: Option<Handle>,
    /// By rule; nothing until it is made.
    calls: Vec<u64>,
    /// All of them, for whoever asks.
    count: Arc<AtomicU64>,
}

impl Delegate {
    /// Makes it, as all ranks have agreed to. Collective; blocks.
    pub(crate) fn new(
        communicator: &Communicator,
        plan: Plan,
        count: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let Plan {
            rules,
            library,
            version,
        } = plan;
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let (endpoint, what) = (
            communicator.endpoint(),
            "making the delegate's communicator",
        );
        let deadline = Instant::now() + communicator.timeout();
        let id = match rank {
            0 => library.unique_id().map(Vec::from),
            _ => Ok(Vec::new()),
        };
        let id = endpoint.settle(id, what, deadline, Error::from)?;
        let ids = communicator.all_gather_bytes(&id)?;
        let id = ids.first().and_then(|id| id.as_slice().try_into().ok());
        let id = id.ok_or_else(|| Error::internal("rank 0 has sent no unique id"))?;
        let mut delegate = Self {
            communicator: communicator.clone(),
            rules,
            library,
            comm: None,
            calls: Vec::new(),
            count,
        };
        // Others may wait for this rank inside of the library.
        let abort = |error: &Error| endpoint.group().abort(&error.text);
        let made = delegate.init(id).inspect_err(abort);
        endpoint.settle(made, what, deadline, Error::from)?;
        delegate.calls = vec![0; delegate.rules.0.len()];
        if rank == 0 {
            settings::say(&format!(
                "communicator of {world_size} ranks: {} delegated to {} (NCCL version {version})",
                delegate.rules,
                delegate.library.path().display()
            ));
        }
        Ok(delegate)
    }

    fn init(&mut self, id: [u8; 128]) -> Result<(), Error> {
        let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let ranks = (
            number(self.communicator.rank()),
            number(self.communicator.world_size()),
        );
        let (comm, returned) = self.library.init(id, ranks, NAME)?;
        if !matches!(returned.code, 0 | IN_PROGRESS) {
            return Err(self.library.error(None, returned));
        }
        self.comm = Some(comm);
        self.finish(returned)
    }

    /// The rule by which an operation with messages of `bytes` bytes is delegated, if one is.
    pub(crate) fn rule(&self, operation: Collective, bytes: u64) -> Option<usize> {
        self.rules
            .0
            .iter()
            .position(|rule| rule.holds(operation, bytes))
    }

    fn comm(&self) -> Result<Handle, Error> {
        self.comm.ok_or_else(|| {
            Error::usage("the delegate's communicator has ended; make a new communicator to go on")
        })
    }

    /// Waits until the library has done what it has begun; gives its communicator up if this one fails meanwhile, or if
    /// it takes too long.
    fn finish(&mut self, returned: Returned) -> Result<(), Error> {
        let comm = self.comm()?;
        let deadline = Instant::now() + self.communicator.timeout();
        let mut code = returned.code;
        let mut rounds = 0_u32;
        while code == IN_PROGRESS {
            let failure = self.communicator.endpoint().group().liveness().failure();
            let late = Instant::now() > deadline;
            if failure.is_some() || late {
                self.abort();
                let limit = self.communicator.timeout();
                return Err(failure.map_or_else(
                    || Error::late(format!("{} has not ended after {limit:?}", returned.name)),
                    |failure| Error::of_failure(&failure),
                ));
            }
            // Short calls are over before a sleep is.
            match rounds {
                0..1000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
            rounds += 1;
            code = self.library.asynchronous(comm)?;
        }
        if code == 0 {
            return Ok(());
        }
        let name = returned.name;
        let error = self.library.error(Some(comm), Returned { name, code });
        self.abort();
        Err(error)
    }

    /// Counts a call, and says the first of each rule.
    fn count(&mut self, rule: usize, operation: Collective, bytes: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.calls[rule] += 1;
        if self.calls[rule] == 1 && self.communicator.rank() == 0 {
            settings::say(&format!(
                "{} of {bytes} bytes goes to {}, by the rule {}",
                operation.name(),
                self.library.path().display(),
                self.rules.0[rule]
            ));
        }
    }

    /// Runs a collective by the `rule`-th rule. Blocks until it is complete.
    pub(crate) fn collective(&mut self, rule: usize, call: &CollectiveCall) -> Result<(), Error> {
        let comm = self.comm()?;
        self.count(rule, call.collective, call.bytes);
        let (send, recv) = addresses(call, &self.communicator);
        let dtype = number_of(call.dtype);
        let (op, made) = match call.reduction {
            Reduction::Plain(op) => (number_of_op(op), false),
            Reduction::PreMultiplied(factor) => {
                let bits = factor.bits(call.dtype.size());
                (self.library.make_operation(comm, bits, dtype)?, true)
            }
        };
        let arguments = Arguments {
            send,
            recv,
            count: usize::try_from(call.bytes).unwrap_or(usize::MAX) / call.dtype.size(),
            dtype,
            op,
            stream: call.stream,
        };
        let returned = self.library.collective(comm, call.collective, &arguments)?;
        self.finish(returned)?;
        match made {
            true => self.library.destroy_operation(comm, op),
            false => Ok(()),
        }
    }

    /// Runs sends and receives, each by a rule, as one group. Blocks until they are complete.
    pub(crate) fn messages(&mut self, messages: &[(usize, Message)]) -> Result<(), Error> {
        let comm = self.comm()?;
        for (rule, message) in messages {
            self.count(*rule, Collective::SendRecv, message.bytes as u64);
        }
        let messages = messages.iter().map(|(_, message)| message);
        let returned = self.library.messages(comm, messages)?;
        self.finish(returned)
    }

    /// Ends the library's communicator in good order.
    pub(crate) fn leave(&mut self) {
        if let Some(comm) = self.comm.take()
            && let Err(error) = self.library.destroy(comm)
        {
            settings::say(&error.to_string());
        }
    }

    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            self.library.abort(comm);
        }
    }
}

impl Drop for Delegate {
    fn drop(&mut self) {
        self.abort();
        if self.communicator.rank() == 0 && !self.calls.is_empty() {
            let counts = self.rules.0.iter().zip(&self.calls);
            let counts: Vec<String> = counts.map(|(rule, n)| format!("{rule} {n}")).collect();
            settings::say(&format!(
                "communicator of {} ranks ends: calls delegated to {}: {}",
                self.communicator.world_size(),
                self.library.path().display(),
                counts.join(", ")
            ));
        }
    }
}

const IN_PROGRESS: i32 = Status::InProgress.code();

/// `ncclDataType_t` of a type.
fn number_of(dtype: DataType) -> i32 {
    let found = (0..12).find(|&number| data_type(number).is_ok_and(|found| found == dtype));
    found.unwrap_or(-1)
}

/// `ncclRedOp_t` of an operation.
fn number_of_op(op: ReduceOp) -> i32 {
    let found = (0..5).find(|&number| reduce_op(number) == Some(op));
    found.unwrap_or(-1)
}

/// The two buffers, as C has them.
fn addresses(call: &CollectiveCall, communicator: &Communicator) -> (u64, u64) {
    let data = match &call.buffers {
        Buffers::Apart(from, to) => return (from.range().start, to.range().start),
        Buffers::InPlace(data) => data.range().start,
    };
    let own = data + u64::from(communicator.rank()) * call.bytes;
    match call.collective.blocks(communicator.world_size()) {
        Some((inputs, outputs)) if inputs < outputs => (own, data),
        Some((inputs, outputs)) if inputs > outputs => (data, own),
        _ => (data, data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_say_which_sizes_of_what() {
        let rules = Rules::parse("all-reduce:1M-, reduce-scatter,broadcast:-64K,send-recv:4096-2G")
            .unwrap();
        assert_eq!(
            rules.to_string(),
            "all-reduce:1048576-,reduce-scatter,broadcast:0-65536,send-recv:4096-2147483648"
        );
        assert_eq!(Rules::parse(&rules.to_string()).unwrap(), rules);
        let holds = |operation, bytes| rules.0.iter().position(|rule| rule.holds(operation, bytes));
        let root = 3;
        for (operation, bytes, expected) in [
            (Collective::AllReduce, (1 << 20) - 1, None),
            (Collective::AllReduce, 1 << 20, Some(0)),
            (Collective::ReduceScatter, 0, Some(1)),
            (Collective::Broadcast { root }, 65535, Some(2)),
            (Collective::Broadcast { root }, 65536, None),
            (Collective::SendRecv, 4096, Some(3)),
            (Collective::AllGather, 1, None),
        ] {
            assert_eq!(holds(operation, bytes), expected, "{operation:?} {bytes}");
        }
    }

    #[test]
    fn rules_that_are_none_are_refused() {
        for (text, words) in [
            (
                "all_reduce",
                "no operation `all_reduce`; there are all-reduce, all-gather",
            ),
            ("all-reduce:1M", "`1M` is no range"),
            ("all-reduce:1T-", "`1T` is no size"),
            ("all-reduce:99999999999999G-", "is no size"),
            ("all-reduce:8-8", "no size is in the range"),
        ] {
            let error = Rules::parse(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert_eq!(Rules::parse("").unwrap().to_string(), "");
    }

    #[test]
    fn types_and_operations_have_the_numbers_they_came_with() {
        for number in 0..12 {
            assert_eq!(number_of(data_type(number).unwrap()), number);
        }
        for number in 0..5 {
            assert_eq!(number_of_op(reduce_op(number).unwrap()), number);
        }
    }
}
