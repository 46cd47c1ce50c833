//! `ncclGroupStart` to `ncclGroupEnd`: calls are gathered, and then run together.
//!
//! Each thread gathers its own. At the end every communicator's calls run on a thread of their own, so that one
//! thread can drive several ranks that wait for each other. Communicators that do not block go on by themselves.
//!
//! On GPUs only what must be prepared first does so on threads. Launches wait for nobody while the driver has room for
//! them, and are made by the thread whose streams they are on, by turns.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use crate::call::{Call, are_apart, own_messages_match};
use crate::comm::{Comm, Phase};
use crate::failure;
use crate::status::{Error, Status};

/// Making a communicator, or changing one: what may not be in one group with collectives.
pub(crate) struct Manage {
    /// The communicator that it makes, which fails with it.
    makes: Option<Arc<Comm>>,
    act: Box<dyn FnOnce() -> Result<(), Error> + Send>,
}

impl Manage {
    /// As part of the work of `comm`.
    fn run(self, comm: &Arc<Comm>) -> Result<(), Error> {
        let result = failure::guarded(self.act);
        if let Some(made) = self.makes {
            made.enter(match &result {
                Ok(()) => Phase::Idle,
                Err(error) => {
                    // The others may have joined it already, and would wait for it.
                    made.tell(error);
                    Phase::Failed(error.clone())
                }
            });
            // One that is made of nothing else is busy until this work ends.
            if !Arc::ptr_eq(&made, comm) {
                made.set_busy(false);
            }
        }
        result
    }
}

#[derive(Default)]
struct Gathered {
    depth: u32,
    /// The first error, which the end of the group returns.
    error: Option<Error>,
    work: Todo,
    /// Communicators that were destroyed in the group. They end with it, after what was called on them.
    ending: Vec<Arc<Comm>>,
}

/// What a communicator is to do.
enum Work {
    /// In that order.
    Manage(Vec<Manage>),
    Calls(Vec<Call>),
}

/// By communicator, in the order of their first calls.
type Todo = Vec<(Arc<Comm>, Work)>;

/// Communicators that a group makes. If one of them cannot be made, the others, which may wait for it, are not made
/// either.
struct Making {
    /// Each with the one that it is made by, which may be itself.
    all: Vec<(Arc<Comm>, Arc<Comm>)>,
    /// What went wrong first.
    cause: OnceLock<Error>,
}

impl Making {
    fn of(work: &Todo) -> Arc<Self> {
        let made = |act: &Manage| act.makes.clone();
        let all = work.iter().flat_map(|(by, work)| {
            let made = acts_of(work).iter().filter_map(made);
            made.map(|made| (Arc::clone(by), made))
        });
        let all = all.collect();
        let cause = OnceLock::new();
        Arc::new(Self { all, cause })
    }

    fn fail(&self, error: &Error) {
        if self.cause.set(error.clone()).is_ok() {
            let reason =
                format!("another communicator of the same group could not be made: {error}");
            let all = self.all.iter().map(|(_, made)| made);
            let unfinished = all.filter(|comm| comm.is_being_made());
            unfinished.for_each(|comm| comm.interrupt(&reason));
        }
    }

    /// Nothing is going to make what `by` was to make.
    fn give_up(&self, by: &Comm, error: &Error) {
        let made = self
            .all
            .iter()
            .filter(|(maker, _)| std::ptr::eq(Arc::as_ptr(maker), by));
        made.for_each(|(_, made)| made.settle(Phase::Failed(error.clone())));
    }
}

thread_local! {
    static GATHERED: RefCell<Gathered> = RefCell::default();
}

/// `ncclGroupStart`.
pub(crate) fn start() {
    GATHERED.with_borrow_mut(|gathered| gathered.depth += 1);
}

/// Whether a group is open on this thread.
pub(crate) fn is_open() -> bool {
    GATHERED.with_borrow(|gathered| gathered.depth > 0)
}

/// Notes that a call inside a group has failed: the group will.
pub(crate) fn fail(error: &Error) {
    GATHERED.with_borrow_mut(|gathered| {
        if gathered.depth > 0 {
            gathered.error.get_or_insert_with(|| error.clone());
        }
    });
}

/// A group that has ended, of which nothing was run yet.
struct Closed {
    work: Result<Todo, Error>,
    ending: Vec<Arc<Comm>>,
}

impl Closed {
    /// Does something with the work, and then ends the communicators that were destroyed, whatever came of it.
    fn with<T>(self, act: impl FnOnce(Todo) -> Result<T, Error>) -> Result<T, Error> {
        let result = self.work.and_then(act);
        self.ending.iter().for_each(|comm| comm.leave());
        result
    }
}

/// Ends one level; at the last one, what was gathered.
fn close() -> Result<Option<Closed>, Error> {
    GATHERED.with_borrow_mut(|gathered| {
        if gathered.depth == 0 {
            return Err(Error::usage("ncclGroupEnd without ncclGroupStart"));
        }
        gathered.depth -= 1;
        if gathered.depth > 0 {
            return Ok(None);
        }
        let Gathered {
            error,
            work,
            ending,
            ..
        } = std::mem::take(gathered);
        let work = match error {
            Some(error) => {
                abandon(&work, &error);
                Err(error)
            }
            None => Ok(work),
        };
        Ok(Some(Closed { work, ending }))
    })
}

/// `ncclGroupEnd`.
pub(crate) fn end() -> Result<Status, Error> {
    match close()? {
        None => Ok(Status::Success),
        Some(closed) => closed.with(run),
    }
}

/// `ncclCommDestroy`: leaves the other ranks, now or when the group ends.
pub(crate) fn leave(comm: Arc<Comm>) {
    if is_open() {
        GATHERED.with_borrow_mut(|gathered| gathered.ending.push(comm));
    } else {
        comm.leave();
    }
}

/// The calls of each communicator of a group.
pub(crate) type CallsOfEach = Vec<(Arc<Comm>, Vec<Call>)>;

/// Ends a group whose calls are only looked at.
pub(crate) fn end_without_running() -> Result<CallsOfEach, Error> {
    let Some(closed) = close()? else {
        return Ok(Vec::new());
    };
    closed.with(|work| {
        if work.iter().any(|(_, work)| matches!(work, Work::Manage(_))) {
            let error = Error::unsupported(
                "the time that making or changing communicators takes",
                "end the group with ncclGroupEnd",
            );
            abandon(&work, &error);
            return Err(error);
        }
        let calls = work.into_iter().filter_map(|(comm, work)| match work {
            Work::Calls(calls) => Some((comm, calls)),
            Work::Manage(_) => None,
        });
        Ok(calls.collect())
    })
}

/// Communicators that were to be made in a group that failed are of no use, and what else was in it was refused.
fn abandon(work: &Todo, error: &Error) {
    work.iter().for_each(|(comm, _)| comm.refuse(error));
    for made in acts(work).filter_map(|act| act.makes.as_ref()) {
        made.settle(Phase::Failed(error.clone()));
    }
}

/// What is to be made or changed.
fn acts(work: &Todo) -> impl Iterator<Item = &Manage> {
    work.iter().flat_map(|(_, work)| acts_of(work))
}

fn acts_of(work: &Work) -> &[Manage] {
    match work {
        Work::Manage(acts) => acts,
        Work::Calls(_) => &[],
    }
}

/// Adds `call` of `comm` to the open group, or runs it.
pub(crate) fn call(comm: &Arc<Comm>, call: Call) -> Result<Status, Error> {
    if let Call::Collective(collective) = &call
        && !is_open()
    {
        comm.check(&call)?;
        if comm.launch_prepared(collective)? {
            return Ok(Status::Success);
        }
    }
    calls(comm, vec![call])
}

/// Adds calls that belong together to the open group, or runs them.
pub(crate) fn calls(comm: &Arc<Comm>, calls: Vec<Call>) -> Result<Status, Error> {
    calls.iter().try_for_each(|call| comm.check(call))?;
    submit(comm, Work::Calls(calls))
}

/// Adds what `comm` is to do otherwise to the open group, or does it; `makes` is the communicator that comes
/// of it.
pub(crate) fn manage(
    comm: &Arc<Comm>,
    makes: Option<Arc<Comm>>,
    act: impl FnOnce() -> Result<(), Error> + Send + 'static,
) -> Result<Status, Error> {
    let act = Box::new(act);
    submit(comm, Work::Manage(vec![Manage { makes, act }]))
}

fn submit(comm: &Arc<Comm>, work: Work) -> Result<Status, Error> {
    if !is_open() {
        return run(vec![(Arc::clone(comm), work)]);
    }
    GATHERED.with_borrow_mut(|gathered| {
        let manages = matches!(work, Work::Manage(_));
        if let Some((other, first)) = gathered.work.first() {
            if manages != matches!(first, Work::Manage(_)) {
                return Err(Error::usage(
                    "making or changing communicators and collectives are in one group; use a group for each",
                ));
            }
            if other.config().blocking != comm.config().blocking {
                return Err(Error::usage(
                    "blocking and non-blocking communicators are in one group; use a group for each",
                ));
            }
        }
        let before = gathered.work.iter_mut().find(|(other, _)| Arc::ptr_eq(other, comm));
        match (before, work) {
            (Some((_, Work::Calls(calls))), Work::Calls(more)) => calls.extend(more),
            (Some((_, Work::Manage(acts))), Work::Manage(more)) => acts.extend(more),
            (_, work) => gathered.work.push((Arc::clone(comm), work)),
        }
        Ok(Status::Success)
    })
}

/// Runs everything; returns the first error in the order in which communicators were first called, or what kept
/// communicators from being made.
fn run(work: Todo) -> Result<Status, Error> {
    let possible = work.iter().try_for_each(|(comm, work)| match work {
        Work::Calls(calls) => {
            are_apart(calls)?;
            own_messages_match(calls, comm.rank()?)
        }
        Work::Manage(_) => Ok(()),
    });
    if let Err(error) = possible {
        abandon(&work, &error);
        return Err(error);
    }
    let blocking = work.first().is_none_or(|(comm, _)| comm.config().blocking);
    let mut parts = work.iter();
    let launches = parts.all(|(comm, work)| comm.is_on_gpu() && matches!(work, Work::Calls(_)));
    if blocking && launches {
        return launch(work);
    }
    let making = Making::of(&work);
    if !blocking {
        return run_in_background(work, &making);
    }
    let results = together(work, &making, |comm, work| one(comm, work, &making));
    if let Some(cause) = making.cause.get().filter(|_| !making.all.is_empty()) {
        return Err(cause.clone());
    }
    results.into_iter().collect::<Result<(), Error>>()?;
    Ok(Status::Success)
}

/// Does something with each communicator's work, all at once; returns the results in their order.
fn together<W: Send>(
    mut work: Vec<(Arc<Comm>, W)>,
    making: &Making,
    act: impl Fn(&Arc<Comm>, W) -> Result<(), Error> + Sync,
) -> Vec<Result<(), Error>> {
    let Some((last, last_work)) = work.pop() else {
        return Vec::new();
    };
    if work.is_empty() {
        return vec![act(&last, last_work)];
    }
    std::thread::scope(|scope| {
        let act = &act;
        let threads: Vec<_> = work
            .into_iter()
            .map(|(comm, work)| {
                let thread = std::thread::Builder::new().name("crossweft-nccl".to_owned());
                // What cannot start fails; the others would wait for it, so they are told.
                let stop = Arc::clone(&comm);
                thread
                    .spawn_scoped(scope, move || act(&comm, work))
                    .map_err(|error| no_thread(&stop, &error, making))
            })
            .collect();
        let last = act(&last, last_work);
        let results = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(Error::internal("a thread of ncclGroupEnd panicked"))),
            Err(error) => Err(error),
        });
        results.chain([last]).collect()
    })
}

/// Launches calls on GPUs, on the streams of this thread.
fn launch(work: Todo) -> Result<Status, Error> {
    let of_calls = |(comm, work)| match work {
        Work::Calls(calls) => Some((comm, calls)),
        Work::Manage(_) => None,
    };
    let work: CallsOfEach = work.into_iter().filter_map(of_calls).collect();
    if let Err(error) = on_streams_apart(&work) {
        work.iter().for_each(|(comm, _)| comm.refuse(&error));
        return Err(error);
    }
    let noted =
        |comm: &Arc<Comm>, result: Result<(), Error>| result.inspect_err(|error| comm.note(error));
    let prepared = match work.iter().all(|(comm, calls)| comm.is_prepared(calls)) {
        true => work.iter().map(|_| Ok(())).collect(),
        false => {
            let each = work.iter().map(|(comm, calls)| (Arc::clone(comm), calls));
            let nothing = Making::of(&Vec::new());
            together(each.collect(), &nothing, |comm, calls| {
                noted(comm, comm.prepare(calls))
            })
        }
    };
    // One that failed is no reason to let the ranks of another wait.
    let begun = work
        .into_iter()
        .zip(prepared)
        .map(|((comm, calls), prepared)| {
            // One of which that is not known yet has nothing to launch either.
            let streams = streams_of(&comm, &calls).unwrap_or_default();
            let launches = prepared.and_then(|()| comm.begin(calls));
            (streams, (comm, launches))
        });
    let mut parts: Vec<_> = begun.collect();
    by_turns(&mut parts, |(comm, launches)| match launches {
        Ok(left) => match comm.launch_next(left) {
            Ok(more) => more,
            Err(error) => {
                *launches = Err(error);
                false
            }
        },
        Err(_) => false,
    });
    let results = parts.into_iter().map(|(_, (comm, launches))| {
        let result = launches.map(|_| ());
        noted(&comm, result)
    });
    // All are noted, whichever is returned.
    let results: Vec<_> = results.collect();
    results.into_iter().collect::<Result<(), Error>>()?;
    Ok(Status::Success)
}

/// A stream of a device.
type On = (i32, u64);

/// Streams that calls are on.
fn streams_of(comm: &Comm, calls: &[Call]) -> Result<Vec<On>, Error> {
    let device = comm.device()?;
    let mut streams: Vec<On> = calls.iter().map(|call| (device, call.stream())).collect();
    streams.sort_unstable();
    streams.dedup();
    Ok(streams)
}

/// Whether what is on one stream may wait for what is on another of the two because it came later. All blocking streams of a
/// device wait for its default one, and that for them.
fn are_in_order(one: &[On], other: &[On]) -> bool {
    let is_default = |stream| stream <= 1;
    one.iter().any(|&(device, stream)| {
        other.iter().any(|&(of, with)| {
            device == of && (stream == with || is_default(stream) || is_default(with))
        })
    })
}

/// Does what several have to do, one `step` of each in turn, until each has said that there is no more. A launch blocks when the
/// driver's queue is full, which it stays for as long as its kernels wait for those of another rank, maybe this
/// thread's. What shares a stream with one before it comes after all of that one's: so the others have it on theirs.
fn by_turns<T>(parts: &mut [(Vec<On>, T)], mut step: impl FnMut(&mut T) -> bool) {
    let behind: Vec<Vec<usize>> = (0..parts.len())
        .map(|part| {
            let shares = |&before: &usize| are_in_order(&parts[before].0, &parts[part].0);
            (0..part).filter(shares).collect()
        })
        .collect();
    let mut left = vec![true; parts.len()];
    while left.contains(&true) {
        for part in 0..parts.len() {
            // The first that is left is behind none.
            if left[part] && !behind[part].iter().any(|&before| left[before]) {
                left[part] = step(&mut parts[part].1);
            }
        }
    }
}

/// Refuses two ranks of one communicator on one stream, where the launch of the one waits for the other's behind it.
fn on_streams_apart(work: &CallsOfEach) -> Result<(), Error> {
    if work.len() < 2 {
        return Ok(());
    }
    let mut seen = Vec::new();
    for (comm, calls) in work {
        let Ok(communicator) = comm.communicator() else {
            continue;
        };
        let tag = communicator.endpoint().group().tag();
        for on in streams_of(comm, calls)? {
            let here = (tag, on);
            if seen.contains(&here) {
                return Err(Error::usage(format!(
                    "two ranks of a communicator are called on one stream of device {}, where one waits for the other \
                     behind it; give each rank a stream of its own",
                    on.0
                )));
            }
            seen.push(here);
        }
    }
    Ok(())
}

/// There is no thread for what `comm` is to do, so it fails.
fn no_thread(comm: &Comm, error: &std::io::Error, making: &Making) -> Error {
    let error = Error::system(format!("cannot start a thread: {error}"));
    comm.settle(Phase::Failed(error.clone()));
    making.give_up(comm, &error);
    comm.stop("it could not start a thread");
    making.fail(&error);
    error
}

fn run_in_background(work: Todo, making: &Arc<Making>) -> Result<Status, Error> {
    for (comm, _) in &work {
        comm.set_busy(true);
    }
    let mut outcome = Ok(Status::InProgress);
    for (comm, work) in work {
        let (own, making_too) = (Arc::clone(&comm), Arc::clone(making));
        let begun = comm.continue_with(move || {
            // An error is what the communicator has failed with.
            let _ = one(&own, work, &making_too);
        });
        if let Err(error) = begun {
            outcome = Err(no_thread(&comm, &error, making));
        }
    }
    outcome
}

fn one(comm: &Arc<Comm>, work: Work, making: &Making) -> Result<(), Error> {
    let result = match work {
        Work::Calls(calls) => comm.run(calls),
        Work::Manage(acts) => {
            let mut first = Ok(());
            for act in acts {
                // What makes nothing has no other way to say so where nobody waits.
                let told = comm.config().blocking || act.makes.is_some();
                let result = act.run(comm);
                if let Err(error) = &result {
                    if !told {
                        comm.enter(Phase::Failed(error.clone()));
                    }
                    making.fail(error);
                }
                first = first.and(result);
            }
            first
        }
    };
    if let Err(error) = &result {
        comm.note(error);
    }
    comm.set_busy(false);
    result
}

#[cfg(test)]
mod tests {
    use crossweft_hal::Device;

    use super::*;
    use crate::config::Config;
    use crate::devices::Place;

    fn not_blocking() -> Arc<Comm> {
        let config = Config {
            blocking: false,
            name: None,
        };
        let place = Place {
            device: Device::Cpu,
            number: None,
        };
        Comm::new(config, place).unwrap()
    }

    #[test]
    fn what_no_thread_makes_has_failed() {
        let (parent, child, other) = (not_blocking(), not_blocking(), not_blocking());
        let makes = |made: &Arc<Comm>| {
            let makes = Some(Arc::clone(made));
            let act = Box::new(|| Ok(()));
            Work::Manage(vec![Manage { makes, act }])
        };
        let work = vec![
            (Arc::clone(&parent), makes(&child)),
            (Arc::clone(&other), makes(&other)),
        ];
        let making = Making::of(&work);
        let error = no_thread(&parent, &std::io::Error::other("injected"), &making);
        assert!(error.text.contains("injected"), "{}", error.text);
        for comm in [&parent, &child] {
            assert_eq!(comm.phase(), Phase::Failed(error.clone()));
            assert_eq!(comm.asynchronous(), error.status);
        }
        // That is for its own thread to say, whose wait was ended.
        assert!(other.is_stopped() && other.is_busy());
    }

    /// What is done by turns, in which order: each part's streams, and how often it has a step.
    fn turns(parts: &[(&[On], usize)]) -> Vec<(usize, usize)> {
        let mut all: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(part, &(streams, steps))| (streams.to_vec(), (part, 0, steps)))
            .collect();
        let mut order = Vec::new();
        by_turns(&mut all, |(part, done, steps)| {
            order.push((*part, *done));
            *done += 1;
            done < steps
        });
        order
    }

    #[test]
    fn each_has_its_turn_but_what_shares_a_stream_comes_later() {
        let apart = turns(&[(&[(0, 7)], 3), (&[(1, 7)], 1), (&[(0, 8)], 2)]);
        assert_eq!(apart, [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]);
        // The third shares a stream with the first, and the last with the second.
        let shared: [(&[On], usize); 4] = [
            (&[(0, 7)], 2),
            (&[(1, 7)], 3),
            (&[(0, 6), (0, 7)], 2),
            (&[(1, 7)], 1),
        ];
        let expected = [
            (0, 0),
            (1, 0),
            (0, 1),
            (1, 1),
            (2, 0),
            (1, 2),
            (2, 1),
            (3, 0),
        ];
        assert_eq!(turns(&shared), expected);
        // A device's default stream is in order with all of its others.
        let default = turns(&[(&[(0, 0)], 2), (&[(0, 7)], 1), (&[(1, 7)], 1)]);
        assert_eq!(default, [(0, 0), (2, 0), (0, 1), (1, 0)]);
    }

    #[test]
    fn a_communicator_is_busy_until_all_of_its_work_has_ended() {
        let comm = not_blocking();
        let own = Arc::clone(&comm);
        let makes = Manage {
            makes: Some(Arc::clone(&comm)),
            act: Box::new(|| Ok(())),
        };
        // Whoever asked in between would begin what is next.
        let asks = Manage {
            makes: None,
            act: Box::new(move || match own.is_busy() {
                true => Ok(()),
                false => Err(Error::internal("it says that it has ended")),
            }),
        };
        let making = Making::of(&Vec::new());
        let result = one(&comm, Work::Manage(vec![makes, asks]), &making);
        assert_eq!(result, Ok(()));
        assert!(!comm.is_busy());
    }
}
