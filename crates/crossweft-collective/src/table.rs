//! Tuning tables: how long each candidate took for each size, on one machine, by one version.
//!
//! As a file a table is one JSON object, with a line for each size:
//!
//! ```json
//! {
//!   "format": "crossweft-tuning", "version": 1, "library": "0.1.0", "world_size": 2,
//!   "fingerprint": { "AMD EPYC, 2 processors, …": 2 },     // ranks on each such thing
//!   "measurements": [
//!     { "collective": "all-reduce", "place": "symmetric", "dtype": "f32", "op": "sum",
//!       "candidates": [ { "name": "one-shot", "blocks": 1, "plan": "9f2c…" }, … ],
//!       "rows": [
//!         { "bytes": 8, "us": [0.13, 0.24] },              // by candidate; null where not measured
//!         … ] } ]
//! }
//! ```
//!
//! `bytes` are those of a message, `us` microseconds of a call on the slowest rank, median. `plan` is
//! [`Plan::content_hash`](crossweft_plan::Plan::content_hash), of a built-in algorithm's plan with one thread block and
//! root 0: times of one that has changed since are not believed. What is chosen follows from the times, so it is not in the file.

use std::fmt::Write as _;
use std::io;

use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::cuda::Cache;
use crossweft_plan::Collective;
use serde::{Deserialize, Serialize};

use crate::algorithm::Algorithm;
use crate::candidate::{Candidate, DeviceKind, Request, collective_named};
use crate::choose::LARGEST as LARGEST_MESSAGE;
use crate::fingerprint::Fingerprint;
use crate::registry::Registry;
use crate::selector::Place;

const FORMAT: &str = "crossweft-tuning";
const VERSION: u32 = 1;
/// More than any table has.
const LARGEST: usize = 8 << 20;
/// The version whose tables are believed: another one may have other kernels.
pub(crate) const LIBRARY: &str = env!("CARGO_PKG_VERSION");

/// Why a table is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// It cannot be read.
    #[error("{source}")]
    File {
        /// Why.
        #[from]
        source: io::Error,
    },
    /// It is not such a JSON object, or its values make no sense.
    #[error("it is not a tuning table: {reason}")]
    Format {
        /// What is wrong.
        reason: String,
    },
    /// It is of another version of the library.
    #[error("it was measured by version {theirs}, this is {LIBRARY}")]
    Library {
        /// Which.
        theirs: String,
    },
    /// It is of other hardware.
    #[error("it was measured on other hardware")]
    Hardware,
}

/// What was measured on one machine with one number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuningTable {
    format: String,
    version: u32,
    library: String,
    world_size: u32,
    fingerprint: Fingerprint,
    measurements: Vec<Measurements>,
}

/// What one tuning of a collective has measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Measurements {
    /// The collective's name; roots are all alike.
    pub collective: String,
    /// Where buffers lay.
    pub place: Place,
    /// The element type's name.
    pub dtype: String,
    /// The reduce operation's name.
    pub op: String,
    /// What was measured.
    pub candidates: Vec<Measured>,
    /// A row for each size, ascending.
    pub rows: Vec<Row>,
    /// Whether it came with the library instead of having been measured here.
    #[serde(skip)]
    pub is_shipped: bool,
}

/// A candidate that was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// Thread blocks of each rank.
    pub blocks: u32,
    /// What identifies its plan, of a built-in algorithm the one with one thread block.
    pub plan: String,
}

/// The times of one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Row {
    /// Bytes of a message.
    pub bytes: u64,
    /// Microseconds, by candidate; none where it was not measured.
    pub us: Vec<Option<f64>>,
}

impl Measurements {
    /// Of a request, without any rows yet.
    pub(crate) fn new(request: &Request, candidates: Vec<Measured>) -> Self {
        Self {
            collective: request.collective.name().to_owned(),
            place: request.place,
            dtype: request.dtype.name().to_owned(),
            op: request.op.name().to_owned(),
            candidates,
            rows: Vec::new(),
            is_shipped: false,
        }
    }

    fn is_of_the_same(&self, other: &Self) -> bool {
        let key = |m: &Self| (m.collective.clone(), m.place, m.dtype.clone(), m.op.clone());
        key(self) == key(other)
    }

    /// What it was measured with, in words.
    pub(crate) fn with(&self) -> String {
        match self.collective().is_some_and(Collective::reduces) {
            true => format!("{} {}", self.dtype, self.op),
            false => self.dtype.clone(),
        }
    }

    /// The collective, with root 0 where it has one.
    pub(crate) fn collective(&self) -> Option<Collective> {
        collective_named(&self.collective, 0)
    }

    fn check(&self) -> Result<(), String> {
        let what = format!("{} in {}", self.collective, self.place);
        let names = (&*self.collective, &*self.dtype, &*self.op);
        if request(names, self.place, 1, DeviceKind::Cpu).is_none() {
            return Err(format!(
                "there is no {} of {} {}",
                self.collective, self.dtype, self.op
            ));
        }
        if !self.rows.is_sorted_by(|a, b| a.bytes < b.bytes) {
            return Err(format!("{what}: sizes do not ascend"));
        }
        for row in &self.rows {
            let bytes = row.bytes;
            if row.us.len() != self.candidates.len() {
                let (times, candidates) = (row.us.len(), self.candidates.len());
                return Err(format!(
                    "{what}: {times} times of {candidates} candidates at {bytes} B"
                ));
            }
            if row
                .us
                .iter()
                .flatten()
                .any(|us| !(us.is_finite() && *us > 0.0))
            {
                return Err(format!("{what}: a time at {bytes} B is no time"));
            }
        }
        Ok(())
    }
}

/// What a measurement of these names of collective, type and operation answers, for messages of any size.
pub(crate) fn request(
    (of, dtype, op): (&str, &str, &str),
    place: Place,
    world_size: u32,
    device: DeviceKind,
) -> Option<Request> {
    Some(Request {
        collective: collective_named(of, 0)?,
        world_size,
        dtype: DataType::from_name(dtype)?,
        op: ReduceOp::from_name(op)?,
        place,
        in_place: None,
        device,
        max_bytes: LARGEST_MESSAGE,
        most_blocks: u32::MAX,
        deterministic: false,
    })
}

impl TuningTable {
    /// One without measurements.
    pub(crate) fn new(fingerprint: Fingerprint, world_size: u32) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            library: LIBRARY.to_owned(),
            world_size,
            fingerprint,
            measurements: Vec::new(),
        }
    }

    /// The name of the file with the table of that hardware.
    #[must_use]
    pub fn file_name(fingerprint: &Fingerprint, world_size: u32) -> String {
        format!("tuning-{}-{world_size}.json", fingerprint.digest())
    }

    /// The table of this hardware and version, if a cache has one.
    ///
    /// # Errors
    /// [`TableError`]: there is one, but it is not to be used.
    pub fn load(
        cache: &Cache,
        fingerprint: &Fingerprint,
        world_size: u32,
    ) -> Result<Option<Self>, TableError> {
        let text = Self::read(cache, fingerprint, world_size)?;
        text.map(|text| Self::of_text(&text, fingerprint, world_size))
            .transpose()
    }

    /// The text of that table, if a cache has one, not looked at.
    pub(crate) fn read(
        cache: &Cache,
        fingerprint: &Fingerprint,
        world_size: u32,
    ) -> Result<Option<Vec<u8>>, TableError> {
        let text = cache.file(&Self::file_name(fingerprint, world_size))?;
        match text {
            Some(text) if text.len() > LARGEST => Err(too_large()),
            text => Ok(text),
        }
    }

    /// The table of that text, which must be of this hardware and version.
    pub(crate) fn of_text(
        text: &[u8],
        fingerprint: &Fingerprint,
        world_size: u32,
    ) -> Result<Self, TableError> {
        let table = Self::from_json(text)?;
        match (&table.fingerprint, table.world_size) == (fingerprint, world_size) {
            true => Ok(table),
            false => Err(TableError::Hardware),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`TableError`]: it is no table, or of another version.
    pub fn from_json(text: &[u8]) -> Result<Self, TableError> {
        /// What is read first, to say something better than "unknown field".
        #[derive(Deserialize)]
        struct Head {
            format: Option<String>,
            version: Option<u32>,
            library: Option<String>,
        }
        let format = |reason: String| TableError::Format { reason };
        if text.len() > LARGEST {
            return Err(too_large());
        }
        let json = |error: serde_json::Error| format(error.to_string());
        let head: Head = serde_json::from_slice(text).map_err(json)?;
        if head.format.as_deref() != Some(FORMAT) || head.version != Some(VERSION) {
            let reason = format!("its format is not `{FORMAT}`, version {VERSION}");
            return Err(format(reason));
        }
        if let Some(theirs) = head.library.filter(|library| library != LIBRARY) {
            return Err(TableError::Library { theirs });
        }
        let table: Self = serde_json::from_slice(text).map_err(json)?;
        for measurements in &table.measurements {
            measurements.check().map_err(format)?;
        }
        Ok(table)
    }

    /// The table as a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Only maps with keys that are not strings cannot be written, and there are none.
        fn json<T: Serialize>(value: &T) -> String {
            serde_json::to_string(value).unwrap_or_default()
        }
        let Self {
            format,
            version,
            library,
            world_size,
            fingerprint,
            measurements,
        } = self;
        let mut text = format!(
            "{{\n\"format\": {}, \"version\": {version}, \"library\": {}, \"world_size\": {world_size},\n\
             \"fingerprint\": {},\n\"measurements\": [",
            json(format),
            json(library),
            json(fingerprint)
        );
        for (i, m) in measurements.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let (collective, place) = (json(&m.collective), json(&m.place));
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "{comma}\n{{ \"collective\": {collective}, \"place\": {place}, \"dtype\": {}, \"op\": {},\n  \
                 \"candidates\": [",
                json(&m.dtype),
                json(&m.op)
            );
            lines(&mut text, m.candidates.iter().map(json));
            text += " ],\n  \"rows\": [";
            lines(&mut text, m.rows.iter().map(json));
            text += " ] }";
        }
        text += "\n] }\n";
        text
    }

    /// The hardware that it was measured on.
    #[must_use]
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// The number of ranks that it was measured with.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// What it holds.
    #[must_use]
    pub fn measurements(&self) -> &[Measurements] {
        &self.measurements
    }

    /// Adds measurements, in the place of older ones of the same.
    pub fn insert(&mut self, new: Measurements) {
        self.measurements.retain(|old| !old.is_of_the_same(&new));
        self.measurements.push(new);
    }

    /// The same with what comes with the library, where this has nothing of its own.
    #[must_use]
    pub(crate) fn on_shipped(mut self, shipped: Option<Self>) -> Self {
        let theirs = shipped.into_iter().flat_map(|table| table.measurements);
        for mut measurements in theirs {
            if !self
                .measurements
                .iter()
                .any(|own| own.is_of_the_same(&measurements))
            {
                measurements.is_shipped = true;
                self.measurements.push(measurements);
            }
        }
        self
    }

    /// What was measured here of it.
    #[must_use]
    pub(crate) fn measured_here(mut self) -> Self {
        self.measurements
            .retain(|measurements| !measurements.is_shipped);
        self
    }

    /// What answers a request: measured here before what came with the library, and of either with its type and operation,
    /// else with its type, else with any. One memory is like two, but for what cannot be done in it.
    pub(crate) fn find(&self, request: &Request) -> Option<&Measurements> {
        let Request { dtype, op, .. } = request;
        let of_place = |place: Place| {
            let those = move |m: &&Measurements| {
                m.place == place && m.collective == request.collective.name()
            };
            let nearness =
                |m: &&Measurements| (!m.is_shipped, m.dtype == dtype.name(), m.op == op.name());
            // The first of several that are as near.
            self.measurements
                .iter()
                .filter(those)
                .rev()
                .max_by_key(nearness)
        };
        of_place(request.place).or_else(|| match request.place {
            Place::OneSymmetric => of_place(Place::Symmetric),
            _ => None,
        })
    }

    /// Drops the times of built-in algorithms whose plans are not what they were, and returns their names. Those of the
    /// user's plans stay: they may be registered later.
    pub(crate) fn forget_changed(&mut self) -> Vec<String> {
        let mut changed = Vec::new();
        for m in &mut self.measurements {
            // Checked when it was read.
            let Some(collective) = m.collective() else {
                continue;
            };
            let current = |measured: &Measured| measured.is_current(collective, self.world_size);
            let keep: Vec<bool> = m.candidates.iter().map(current).collect();
            for (measured, _) in m.candidates.iter().zip(&keep).filter(|(_, keep)| !**keep) {
                changed.push(format!("{} {}", m.collective, measured.name));
            }
            retain(&mut m.candidates, &keep);
            for row in &mut m.rows {
                retain(&mut row.us, &keep);
            }
        }
        changed.dedup();
        changed
    }
}

fn too_large() -> TableError {
    TableError::Format {
        reason: format!("it has more than {LARGEST} bytes"),
    }
}

fn retain<T>(values: &mut Vec<T>, keep: &[bool]) {
    let mut keep = keep.iter();
    values.retain(|_| keep.next().is_some_and(|keep| *keep));
}

/// Values with a line each.
fn lines(text: &mut String, values: impl Iterator<Item = String>) {
    for (i, value) in values.enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(text, "{comma}\n    {value}");
    }
}

impl Measured {
    /// Of a candidate with its plan's hash.
    pub(crate) fn new(candidate: &Candidate, blocks: u32, plan: String) -> Self {
        Self {
            name: candidate.name().to_owned(),
            blocks,
            plan,
        }
    }

    /// What it is today: one of ours by its name, one of the user's by its plan.
    pub(crate) fn candidate(
        &self,
        collective: Collective,
        registry: &Registry,
    ) -> Option<Candidate> {
        if let Some(algorithm) = self.built_in(collective) {
            return Some(algorithm.into());
        }
        let mut plans = registry.plans().iter();
        plans
            .find(|plan| plan.hash() == self.plan)
            .map(|plan| Candidate::Plan(plan.clone()))
    }

    /// Whether its plan is what it was; one of the user's is told by its plan.
    fn is_current(&self, collective: Collective, world_size: u32) -> bool {
        self.built_in(collective).is_none_or(|algorithm| {
            let plan = algorithm.plan_of(collective, world_size, 1);
            plan.is_ok_and(|plan| plan.content_hash() == self.plan)
        })
    }

    fn built_in(&self, collective: Collective) -> Option<Algorithm> {
        let mut known = Algorithm::of(collective).iter().copied();
        known.find(|algorithm| algorithm.name() == self.name)
    }
}
