//! What a communicator chooses by: the plans and the tuning table that it found when it was made, the same on every
//! rank.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crossweft_channel::Endpoint;
use crossweft_hal::cuda::Cache;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::candidate::{DeviceKind, Request};
use crate::choose::{choose, measured};
use crate::error::{CollectiveError, SelectorDifference};
use crate::fingerprint::{Fingerprint, of_rank};
use crate::registry::{Registry, RegistryError};
use crate::selector::{Choice, Place, Selector};
use crate::shipped;
use crate::table::TuningTable;

/// The variable that turns tuning tables off where it is `off`, `no`, `false` or `0`.
pub const TUNING_VARIABLE: &str = "CROSSWEFT_TUNING";

/// The variable that has all sums in rank order where it is `1`, or anything but nothing, `0`, `off`, `no` and `false`:
/// [`CollectiveOptions::deterministic`](crate::CollectiveOptions::deterministic).
pub const DETERMINISTIC_VARIABLE: &str = "CROSSWEFT_DETERMINISTIC";

/// What choices are made by: the registered plans, and the tuning table of this hardware, if there is one.
#[derive(Clone, Debug)]
pub struct Selection {
    registry: Registry,
    table: Option<Arc<TuningTable>>,
    /// Where choices come from, for people.
    source: String,
    /// Why a table is not used, or not all of it.
    warnings: Vec<String>,
    fingerprint: Fingerprint,
    world_size: u32,
    is_deterministic: bool,
}

impl Selection {
    /// What the environment says, for a job of `world_size` ranks on that hardware: plans of `CROSSWEFT_PLANS`, and the
    /// table in the cache, unless `CROSSWEFT_TUNING` is `off`. A table that is not to be used is as if it
    /// were not there, with a [warning](Self::warnings).
    ///
    /// # Errors
    /// [`RegistryError`]: a plan that was named is none.
    pub fn from_environment(
        fingerprint: Fingerprint,
        world_size: u32,
    ) -> Result<Self, RegistryError> {
        Self::decide(fingerprint, world_size, |name| std::env::var_os(name))
    }

    /// As [`from_environment`](Self::from_environment), by an environment that `variable` gives.
    ///
    /// # Errors
    /// As there.
    pub fn decide(
        fingerprint: Fingerprint,
        world_size: u32,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, RegistryError> {
        let registry = Registry::from_environment(&variable)?;
        let found = Found::look(&fingerprint, world_size, &variable);
        let mut selection = Self::shipped(fingerprint, world_size);
        selection.registry = registry;
        selection.is_deterministic = is_deterministic(&variable);
        selection.choose_by(found);
        selection.warnings.extend(misunderstood(&variable));
        Ok(selection)
    }

    /// What a table says, of its hardware and number of ranks, and nothing else.
    #[must_use]
    pub fn of_table(table: TuningTable) -> Self {
        let mut selection = Self::shipped(table.fingerprint().clone(), table.world_size());
        selection.tuned(table, None);
        selection
    }

    /// The shipped rule alone, whatever the environment.
    #[must_use]
    pub fn shipped(fingerprint: Fingerprint, world_size: u32) -> Self {
        Self {
            registry: Registry::new(),
            table: None,
            source: "the shipped rule".to_owned(),
            warnings: Vec::new(),
            fingerprint,
            world_size,
            is_deterministic: false,
        }
    }

    /// Takes the table that was found, if it is to be used, and what comes with the library where it says nothing.
    fn choose_by(&mut self, found: Found) {
        let shipped = match &found {
            Found::Off => None,
            _ => shipped::table(&self.fingerprint),
        };
        let otherwise = match &shipped {
            Some(_) => shipped::source(&self.fingerprint),
            None => "the shipped rule".to_owned(),
        };
        self.take(found, &otherwise);
        if let Some(shipped) = shipped {
            let own = self.table.take().map(Arc::unwrap_or_clone);
            let own =
                own.unwrap_or_else(|| TuningTable::new(self.fingerprint.clone(), self.world_size));
            self.table = Some(Arc::new(own.on_shipped(Some(shipped))));
        }
    }

    /// Takes the table that was found, if it is to be used; choices come from elsewhere otherwise.
    fn take(&mut self, found: Found, otherwise: &str) {
        let (path, text) = match found {
            Found::Off => {
                self.source = format!("{otherwise} ({TUNING_VARIABLE}=off)");
                return;
            }
            Found::Nothing { why } => {
                self.source = format!("{otherwise} ({why})");
                return;
            }
            Found::Unreadable { path, why } => (path, Err(why)),
            Found::File { path, text } => (path, Ok(text)),
        };
        let table = text.and_then(|text| {
            let table = TuningTable::of_text(&text, &self.fingerprint, self.world_size);
            table.map_err(|error| error.to_string())
        });
        match table {
            Ok(mut table) => {
                let changed = table.forget_changed();
                if !changed.is_empty() {
                    let changed = changed.join(", ");
                    self.warnings.push(format!(
                        "tuning table {path}: {changed} changed since it was measured; run `crossweft tune` again"
                    ));
                }
                self.table = Some(Arc::new(table));
                self.source = format!("tuning table {path}");
            }
            Err(why) => {
                self.warnings.push(format!(
                    "tuning table {path} is not used: {why}; run `crossweft tune` again"
                ));
                self.source = format!("{otherwise} (tuning table {path} is not used: {why})");
            }
        }
    }

    /// The algorithms that may be chosen.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The algorithms that may be chosen, to register more.
    pub fn registry_mut(&mut self) -> &mut Registry {
        &mut self.registry
    }

    /// The tuning table.
    #[must_use]
    pub fn table(&self) -> Option<&TuningTable> {
        self.table.as_deref()
    }

    /// Where choices come from, in words.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Why a table is not used, or not all of it.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The hardware it is for.
    #[must_use]
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// The number of ranks it is for.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Whether all sums are to be in rank order.
    #[must_use]
    pub fn is_deterministic(&self) -> bool {
        self.is_deterministic
    }

    /// Takes the table of new measurements instead of what was there.
    pub(crate) fn tuned(&mut self, table: TuningTable, path: Option<&Path>) {
        let table = table.on_shipped(shipped::table(&self.fingerprint));
        self.source = match path {
            Some(path) => format!("tuning table {}", path.display()),
            None => "a tuning table of no file".to_owned(),
        };
        self.table = Some(Arc::new(table));
    }

    /// The choices for a request.
    #[must_use]
    pub fn select(&self, request: &Request) -> Selector {
        choose(request, &self.registry, self.table())
    }

    /// What the environment of every rank says of plans, which must be the same, and that of rank 0 of a tuning table, which
    /// all take from it: a table that is replaced meanwhile cannot be another on another rank. Collective; blocks.
    pub(crate) fn of_job(endpoint: &Endpoint, deadline: Instant) -> Result<Self, CollectiveError> {
        let group = endpoint.group();
        let own = of_rank(endpoint.device(), endpoint.cores(), group.local_size());
        let own = endpoint.settle(own.map_err(CollectiveError::from), READING, deadline, wrap)?;
        let ranks = endpoint.exchange(&own, READING, deadline)?;
        let (fingerprint, world_size) = (Fingerprint::of_ranks(ranks), endpoint.world_size());
        let variable = |name: &str| std::env::var_os(name);
        let registry = Registry::from_environment(variable).map_err(CollectiveError::from);
        let registry = endpoint.settle(registry, READING, deadline, wrap)?;
        let found = match endpoint.rank() {
            0 => Found::look(&fingerprint, world_size, variable),
            _ => Found::Nothing { why: String::new() },
        };
        let mut found = endpoint.exchange(&found, READING, deadline)?;
        let mut selection = Self::shipped(fingerprint, world_size);
        selection.registry = registry;
        selection.is_deterministic = is_deterministic(variable);
        selection.choose_by(found.swap_remove(0));
        selection.warnings.extend(misunderstood(variable));
        selection.agree(endpoint, deadline)?;
        let warn = |warning| tracing::warn!("{warning}");
        if endpoint.rank() == 0 {
            selection.warnings.iter().for_each(warn);
            tracing::info!("algorithms are chosen by {}", selection.source);
        }
        Ok(selection)
    }

    /// Makes sure that every rank would choose the same. Collective.
    pub(crate) fn agree(
        &self,
        endpoint: &Endpoint,
        deadline: Instant,
    ) -> Result<(), CollectiveError> {
        let device = DeviceKind::from(endpoint.device());
        let keys = self.keys();
        let bands = self.bands(&keys, device);
        let digest = digest(&(self.plans(), &keys, bands, self.is_deterministic));
        let all: Vec<String> = endpoint.exchange(&digest, AGREEING, deadline)?;
        if all.iter().all(|theirs| *theirs == all[0]) {
            return Ok(());
        }
        // Everybody has seen that, and comes here.
        let all: Vec<bool> = endpoint.exchange(&self.is_deterministic, AGREEING, deadline)?;
        if let Some(rank) = all.iter().position(|theirs| *theirs != all[0]) {
            let (rank, value) = (rank as u32, all[rank]);
            return Err(CollectiveError::DeterminismDiffers { rank, value });
        }
        let plans: Vec<BTreeMap<String, String>> =
            endpoint.exchange(&self.plans(), AGREEING, deadline)?;
        if let Some(error) = plans_differ(&plans) {
            return Err(error);
        }
        let keys: Vec<BTreeSet<Key>> = endpoint.exchange(&keys, AGREEING, deadline)?;
        let keys = keys.into_iter().flatten().collect();
        let own = (self.bands(&keys, device), self.source.clone());
        let all: Vec<(Vec<Bands>, String)> = endpoint.exchange(&own, AGREEING, deadline)?;
        let differ = all.iter().position(|(bands, _)| *bands != all[0].0);
        let Some(rank) = differ else {
            return Ok(());
        };
        let tables = all[rank].0.iter().zip(&all[0].0);
        let first = tables.zip(&keys).find_map(|((theirs, ours), key)| {
            difference(theirs, ours).map(|difference| (difference, key))
        });
        let Some((difference, key)) = first else {
            return Ok(());
        };
        let sources = (&*all[rank].1, &*all[0].1);
        let what = format!("{}, {}", key.collective, key.place);
        Err(difference.error(rank as u32, what, sources))
    }

    /// By hash and name, what is said of the registered plans.
    fn plans(&self) -> BTreeMap<String, String> {
        let plans = self.registry.plans().iter();
        plans
            .map(|plan| {
                let name = &plan.plan().name;
                let words = format!("`{name}` of {}", plan.origin());
                (format!("{} {name}", plan.hash()), words)
            })
            .collect()
    }

    fn keys(&self) -> BTreeSet<Key> {
        let measurements = self.table().map_or(&[][..], TuningTable::measurements);
        let key = |m: &crate::table::Measurements| Key {
            collective: m.collective.clone(),
            place: m.place,
            dtype: m.dtype.clone(),
            op: m.op.clone(),
        };
        measurements.iter().map(key).collect()
    }

    /// What would be chosen for each key.
    fn bands(&self, keys: &BTreeSet<Key>, device: DeviceKind) -> Vec<Bands> {
        let of = |key: &Key| {
            let request = key.request(self.world_size, device);
            request.map_or_else(Vec::new, |request| {
                bands(&measured(&request, &self.registry, self.table()))
            })
        };
        keys.iter().map(of).collect()
    }
}

/// What there is of a tuning table.
#[derive(Debug, Serialize, Deserialize)]
enum Found {
    /// Tables are turned off.
    Off,
    /// None, and why.
    Nothing { why: String },
    /// One that cannot be read.
    Unreadable { path: String, why: String },
    /// What a file holds.
    File { path: String, text: Vec<u8> },
}

impl Found {
    /// Of that hardware, in an environment that `variable` gives.
    fn look(
        fingerprint: &Fingerprint,
        world_size: u32,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Self {
        // An empty one is as none.
        if variable(TUNING_VARIABLE).is_some_and(|value| !value.is_empty() && says_no(&value)) {
            return Self::Off;
        }
        let cache = Cache::decide(&variable);
        let Some(directory) = cache.directory() else {
            let why = "no cache folder".to_owned();
            return Self::Nothing { why };
        };
        let path = directory.join(TuningTable::file_name(fingerprint, world_size));
        let path = path.display().to_string();
        match TuningTable::read(&cache, fingerprint, world_size) {
            Ok(Some(text)) => Self::File { path, text },
            Ok(None) => Self::Nothing {
                why: format!("there is no tuning table {path}"),
            },
            Err(error) => Self::Unreadable {
                path,
                why: error.to_string(),
            },
        }
    }
}

fn is_deterministic(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    // Who asks in other words must not get other bits.
    variable(DETERMINISTIC_VARIABLE).is_some_and(|value| !says_no(&value))
}

fn says_no(value: &OsString) -> bool {
    is_one_of(value, &["", "0", "off", "no", "false"])
}

fn is_one_of(value: &OsString, words: &[&str]) -> bool {
    words.iter().any(|word| value.eq_ignore_ascii_case(word))
}

/// A word for a setting of tuning tables that is neither yes nor no, such as the name of a file.
fn misunderstood(variable: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let value = variable(TUNING_VARIABLE)?;
    let is_known = says_no(&value) || is_one_of(&value, &["1", "on", "yes", "true"]);
    (!is_known).then(|| {
        format!(
            "{TUNING_VARIABLE} is {value:?}, which says nothing: it is `off` or `on`; the tables are in \
             CROSSWEFT_CACHE_DIR"
        )
    })
}

const READING: &str = "reading plans and tuning tables";
const AGREEING: &str = "comparing plans and tuning tables";

fn wrap(error: crossweft_channel::ChannelError) -> CollectiveError {
    error.into()
}

/// What a measurement is of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    collective: String,
    place: Place,
    dtype: String,
    op: String,
}

impl Key {
    fn request(&self, world_size: u32, device: DeviceKind) -> Option<Request> {
        let Self {
            collective,
            place,
            dtype,
            op,
        } = self;
        crate::table::request((&**collective, &**dtype, &**op), *place, world_size, device)
    }
}

/// Choices as they are compared: up to which size, what, and what identifies a plan.
pub(crate) type Bands = Vec<(u64, String, String)>;

/// Choices as they are compared.
pub(crate) fn bands(choices: &[Choice]) -> Bands {
    let band = |choice: &Choice| {
        let name = match choice.blocks {
            1 => choice.algorithm.name().to_owned(),
            blocks => format!("{} of {blocks} thread blocks", choice.algorithm),
        };
        let hash = match &choice.algorithm {
            crate::Candidate::Plan(plan) => plan.hash().to_owned(),
            crate::Candidate::BuiltIn(_) => String::new(),
        };
        (choice.up_to, name, hash)
    };
    choices.iter().map(band).collect()
}

/// A short value that differs where the values do.
pub(crate) fn digest<T: Serialize>(value: &T) -> String {
    // Only maps with keys that are not strings cannot be written, and there are none.
    let text = serde_json::to_string(value).unwrap_or_default();
    let digest = Sha256::digest(text);
    digest[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Sizes for which two ranks would take different things.
pub(crate) struct Difference {
    above: u64,
    up_to: u64,
    theirs: String,
    ours: String,
}

/// The first sizes for which choices differ.
pub(crate) fn difference(theirs: &Bands, ours: &Bands) -> Option<Difference> {
    let (mut i, mut j, mut above) = (0, 0, 0);
    while let (Some(a), Some(b)) = (theirs.get(i), ours.get(j)) {
        let up_to = a.0.min(b.0);
        if (&a.1, &a.2) != (&b.1, &b.2) {
            let (theirs, ours) = match a.1 == b.1 {
                false => (a.1.clone(), b.1.clone()),
                true => (format!("{} ({})", a.1, a.2), format!("{} ({})", b.1, b.2)),
            };
            return Some(Difference {
                above,
                up_to,
                theirs,
                ours,
            });
        }
        (i, j) = (i + usize::from(a.0 == up_to), j + usize::from(b.0 == up_to));
        above = up_to;
    }
    None
}

impl Difference {
    /// The error that says so: of `rank`, compared with rank 0.
    pub(crate) fn error(
        self,
        rank: u32,
        what: String,
        (source, other_source): (&str, &str),
    ) -> CollectiveError {
        CollectiveError::SelectorsDiffer(Box::new(SelectorDifference {
            what,
            sizes: match self.above {
                0 => (0, self.up_to),
                above => (above + 1, self.up_to),
            },
            rank,
            choice: self.theirs,
            chosen_by: source.to_owned(),
            other_rank: 0,
            other_choice: self.ours,
            other_chosen_by: other_source.to_owned(),
        }))
    }
}

/// The first rank whose plans are not those of rank 0.
fn plans_differ(all: &[BTreeMap<String, String>]) -> Option<CollectiveError> {
    let first = &all[0];
    let (rank, theirs) = (0..)
        .zip(all)
        .find(|(_, theirs)| theirs.keys().ne(first.keys()))?;
    let missing = |of: &BTreeMap<String, String>, from: &BTreeMap<String, String>| {
        let mut plans = of.iter();
        plans
            .find(|(key, _)| !from.contains_key(*key))
            .map(|(_, words)| words.clone())
    };
    let (has, has_not, plan) = match missing(theirs, first) {
        Some(plan) => (rank, 0, plan),
        None => (0, rank, missing(first, theirs)?),
    };
    Some(CollectiveError::PlansDiffer { has, plan, has_not })
}

/// Makes sure that every rank has made the same choices for what they have agreed to ask for, `described`, while doing
/// `what`. Collective.
pub(crate) fn agree_on_choices(
    endpoint: &Endpoint,
    (described, what): (&str, &str),
    selector: &Selector,
    source: &str,
    deadline: Instant,
) -> Result<(), CollectiveError> {
    let (choices, otherwise) = selector.all().split_at(selector.choices().len());
    let kinds = [bands(choices), bands(otherwise)];
    let all: Vec<String> = endpoint.exchange(&digest(&kinds), what, deadline)?;
    if all.iter().all(|theirs| *theirs == all[0]) {
        return Ok(());
    }
    let own = (kinds, source.to_owned());
    let all: Vec<([Bands; 2], String)> = endpoint.exchange(&own, what, deadline)?;
    let found = (0..).zip(&all).find_map(|(rank, (theirs, source))| {
        let mut kinds = theirs.iter().zip(&all[0].0);
        let found = kinds.find_map(|(theirs, ours)| difference(theirs, ours))?;
        Some(found.error(rank, described.to_owned(), (source, &all[0].1)))
    });
    found.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use crossweft_plan::Collective;

    use super::*;

    fn bands(of: &[(u64, &str)]) -> Bands {
        of.iter()
            .map(|(up_to, name)| (*up_to, (*name).to_owned(), String::new()))
            .collect()
    }

    #[test]
    fn ranks_that_have_chosen_differently_are_told_when_they_prepare() {
        use crate::{Algorithm, CommunicatorOptions, run_in_threads};
        let (place, most) = (Place::Private, 4096);
        let errors = run_in_threads(3, CommunicatorOptions::default(), |communicator| {
            let all_reduce = Collective::AllReduce;
            let selector = match communicator.rank() {
                2 => Selector::forced(Algorithm::Ring, all_reduce, 3, most),
                _ => Selector::new(all_reduce, 3, place, most),
            };
            let (endpoint, deadline) = (communicator.endpoint(), communicator.deadline());
            let words = ("all-reduce", "preparing");
            let agreed = agree_on_choices(endpoint, words, &selector, "a test", deadline);
            Ok(agreed.unwrap_err().to_string())
        })
        .unwrap();
        for error in errors {
            let expected = "all-reduce: rank 2 would take ring for 0..512 B (a test), rank 0 one-shot (a test)";
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_first_sizes_that_differ_are_named() {
        let found = |theirs: &[(u64, &str)], ours: &[(u64, &str)]| {
            let found = difference(&bands(theirs), &bands(ours))?;
            Some((found.above, found.up_to, found.theirs, found.ours))
        };
        let shipped = [(512, "one-shot"), (1 << 20, "two-shot")];
        assert_eq!(found(&shipped, &shipped), None);
        // The same, in other pieces.
        assert_eq!(
            found(
                &[(8, "one-shot"), (512, "one-shot"), (1 << 20, "two-shot")],
                &shipped
            ),
            None
        );
        let ring = |above, up_to| Some((above, up_to, "ring".to_owned(), "two-shot".to_owned()));
        let theirs = [
            (512, "one-shot"),
            (65_536, "two-shot"),
            (131_072, "ring"),
            (1 << 20, "two-shot"),
        ];
        assert_eq!(found(&theirs, &shipped), ring(65_536, 131_072));
        assert_eq!(
            found(&[(512, "one-shot"), (1 << 20, "ring")], &shipped),
            ring(512, 1 << 20)
        );
    }
}
