//! Measures the candidates of collectives on this machine, and keeps what it found.
//!
//! For each size, powers of two and two sizes between each and the next, all candidates take turns: the input is
//! written anew, a tiny all-reduce lines the ranks up, one call is timed. A call takes as long as on the slowest rank,
//! a candidate the median of its calls; those that are near the best get more of them, as far as the budget goes. On
//! GPUs, calls are recorded into a graph, and its replays are timed by the device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_device::extent::GRANULE;
use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::{ExecutorError, Recorded};
use crossweft_hal as hal;
use crossweft_hal::cuda::Cache;
use crossweft_plan::Collective;

use crate::candidate::{Candidate, Request, collective_named};
use crate::collective::{CollectiveOptions, PreparedCollective};
use crate::communicator::{Communicator, SymmetricBuffer};
use crate::error::CollectiveError;
use crate::registry::Entry;
use crate::selection::Selection;
use crate::selector::{Choice, Place, Selector};
use crate::table::{Measured, Measurements, Row, TuningTable};

/// What is to be measured: the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct TuneOptions {
    /// The collective.
    pub collective: Collective,
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation; of no account where nothing is reduced.
    pub op: ReduceOp,
    /// Where buffers lie.
    pub place: Place,
    /// Largest message in bytes.
    pub max_bytes: u64,
    /// How long it may take, about: every candidate is measured a few times at every power of two, whatever the budget.
    pub budget: Duration,
}

impl TuneOptions {
    /// All of it in words.
    fn describe(&self) -> String {
        let Self {
            collective,
            dtype,
            op,
            place,
            max_bytes,
            budget,
        } = self;
        format!("{collective:?} of {dtype} {op}, {place}, up to {max_bytes} B, in {budget:?}")
    }

    /// Checks that there are sizes to measure: nothing measured would take the place of what a table holds.
    fn fits(&self, communicator: &Communicator) -> Result<(), CollectiveError> {
        let (dtype, bytes) = (self.dtype, self.max_bytes);
        let (i, o) = blocks(self.collective, communicator.world_size());
        let largest = bytes.checked_mul(u64::from(i.max(o)));
        let reason = if bytes < dtype.size() as u64 {
            format!(
                "messages of up to {bytes} B hold no element of {dtype}: there is nothing to tune"
            )
        } else if largest.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            format!("buffers for messages of {bytes} B are larger than memory can be")
        } else {
            return Ok(());
        };
        let rank = communicator.rank();
        Err(CollectiveError::Usage { rank, reason })
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// Of the options, which is being measured.
    pub index: usize,
    /// Bytes of the message that is measured next.
    pub bytes: u64,
    /// Sizes done, of all options.
    pub done: usize,
    /// Sizes in all.
    pub sizes: usize,
}

/// What came of it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Tuned {
    /// The table, with what it held before.
    pub table: TuningTable,
    /// Where it was written; `None` on all ranks but one of each host, and where nothing is kept.
    pub path: Option<PathBuf>,
    /// How long measuring took here, for each of the options.
    pub took: Vec<Duration>,
    /// How many of the times, of how many, were at least twice as long as the shortest call: signs of other work on
    /// this machine, with which not much can be told apart.
    pub disturbed: (usize, usize),
}

/// Measures what `options` say, adds it to the communicator's tuning table, writes that into `cache`, and has the
/// communicator choose by it. Collective; blocks.
///
/// # Errors
/// [`CollectiveError`]: a call failed, ranks disagree, a peer died, or the table cannot be written;
/// [`CollectiveError::Usage`], with nothing measured, where there is no size to measure.
pub fn tune(
    communicator: &Communicator,
    options: &[TuneOptions],
    cache: &Cache,
    mut progress: impl FnMut(&Progress),
) -> Result<Tuned, CollectiveError> {
    // Ranks that have other budgets would make other numbers of calls.
    let asked: Vec<String> = options.iter().map(TuneOptions::describe).collect();
    let (endpoint, deadline) = (communicator.endpoint(), communicator.deadline());
    endpoint.agree(&asked.join("; "), "tuning", deadline)?;
    for one in options {
        one.fits(communicator)?;
    }
    let selection = communicator.selection();
    let world_size = communicator.world_size();
    let fingerprint = selection.fingerprint().clone();
    let mut table = match selection.table() {
        Some(table) => table.clone().measured_here(),
        None => TuningTable::new(fingerprint.clone(), world_size),
    };
    let grid = |one: &TuneOptions| sizes(one.dtype.size() as u64, one.max_bytes);
    let all = options.iter().map(|one| grid(one).len()).sum();
    let mut done = 0;
    let (mut took, mut measured) = (Vec::new(), Vec::new());
    let mut disturbed = (0, 0);
    for (index, one) in options.iter().enumerate() {
        let started = Instant::now();
        let mut tuner = Tuner::new(communicator, &selection, one)?;
        let sizes = grid(one);
        for (at, &bytes) in sizes.iter().enumerate() {
            progress(&Progress {
                index,
                bytes,
                done,
                sizes: all,
            });
            done += 1;
            let is_last = at + 1 == sizes.len();
            if tuner.spent > one.budget && !bytes.is_power_of_two() && !is_last {
                continue;
            }
            tuner.size(bytes, sizes.len() - at)?;
        }
        disturbed.0 += tuner.disturbed;
        disturbed.1 += tuner.timed;
        measured.push(tuner.measurements.clone());
        table.insert(tuner.measurements);
        took.push(started.elapsed());
    }
    let is_writer = communicator.endpoint().group().local_rank() == 0;
    let name = TuningTable::file_name(&fingerprint, world_size);
    let stored = match is_writer {
        true => store((&selection, cache), &table, measured),
        false => Ok(None),
    };
    let stored = stored.map_err(|source| CollectiveError::Store {
        folder: cache.directory().unwrap_or(name.as_ref()).to_owned(),
        source,
    });
    let what = "writing the tuning table";
    let deadline = communicator.deadline();
    let path = communicator
        .endpoint()
        .settle(stored, what, deadline, CollectiveError::from)?;
    let mut tuned = Selection::clone(&selection);
    let written = cache.directory().map(|folder| folder.join(&name));
    tuned.tuned(table.clone(), written.as_deref());
    communicator.select_by(tuned)?;
    Ok(Tuned {
        table,
        path,
        took,
        disturbed,
    })
}

/// Writes what was measured now into the file, where others may have put theirs since the communicator was made, or it was
/// made without a table, as these were turned off. One that is not to be used makes way for `table`.
fn store(
    (selection, cache): (&Selection, &Cache),
    table: &TuningTable,
    measured: Vec<Measurements>,
) -> std::io::Result<Option<PathBuf>> {
    let (fingerprint, world_size) = (selection.fingerprint(), selection.world_size());
    let name = TuningTable::file_name(fingerprint, world_size);
    cache.update_file(&name, |there| {
        let there =
            there.and_then(|text| TuningTable::of_text(&text, fingerprint, world_size).ok());
        let Some(mut there) = there else {
            return table.to_json().into_bytes();
        };
        there.forget_changed();
        for new in measured {
            there.insert(new);
        }
        there.to_json().into_bytes()
    })
}

/// Blocks of a message in the input and in the output.
fn blocks(collective: Collective, world_size: u32) -> (u32, u32) {
    collective.blocks(world_size).unwrap_or((1, 1))
}

/// Sizes up to `max` that are measured, each a multiple of `unit`: powers of two, and where calls take long enough to
/// tell, 1.25 and 1.75 times those.
fn sizes(unit: u64, max: u64) -> Vec<u64> {
    const FIRST_BETWEEN: u64 = 4 << 10;
    let mut sizes = Vec::new();
    for two in (3..u64::BITS)
        .map(|power| 1 << power)
        .take_while(|two| *two <= max)
    {
        let quarters: &[u64] = if two < FIRST_BETWEEN {
            &[4]
        } else {
            &[4, 5, 7]
        };
        sizes.extend(quarters.iter().map(|quarter| two / 4 * quarter));
    }
    sizes.push(max);
    sizes.retain_mut(|bytes| {
        *bytes = *bytes / unit * unit;
        (1..=max).contains(bytes)
    });
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Calls of each candidate at each size, at least; one more warms it up.
const LEAST_CALLS: usize = 3;
/// At most, for those that are near the best.
const MOST_CALLS: usize = 40;
/// How near that is.
const NEAR: f64 = 1.5;
/// A candidate whose shortest call takes this many times what the best usually takes, at so many sizes in a row each time
/// more so, is left out from there on: what is slow for small messages may be fast for large ones, but not what falls
/// behind. Against the best's median, for other work on the machine, which delays some calls and spares others, must not
/// look like falling behind.
const FAR: f64 = 4.0;
const FAR_SIZES: u32 = 3;

struct Tuner<'a> {
    communicator: &'a Communicator,
    options: &'a TuneOptions,
    contestants: Vec<Contestant>,
    buffers: Buffers,
    /// What inputs hold.
    data: Vec<u8>,
    /// A tiny all-reduce that lines the ranks up, and what it works on where that is a GPU.
    gate: (PreparedCollective, Option<hal::Memory>),
    measurements: Measurements,
    started: Instant,
    /// How long it took so far on the rank that is slowest: all ranks know the same.
    spent: Duration,
    /// How many of the times that were taken are twice the shortest.
    disturbed: usize,
    timed: usize,
}

struct Contestant {
    entry: Entry,
    /// Which of the measured candidates it is.
    column: usize,
    /// The smallest message that it is for.
    least: u64,
    most: u64,
    call: PreparedCollective,
    /// How many times slower than the best it was at the size before.
    behind: f64,
    /// For how many sizes it has fallen behind.
    far: u32,
}

/// Where calls find their data.
enum Buffers {
    Host(Vec<u8>, Vec<u8>),
    /// Inputs; what is prepared keeps the memory of outputs.
    Symmetric(SymmetricBuffer),
    /// On a GPU.
    Device(Arc<hal::Memory>, Arc<hal::Memory>),
}

/// Of any type a harmless number, neither tiny nor huge.
const BYTE: u8 = 0x3f;

impl<'a> Tuner<'a> {
    fn new(
        communicator: &'a Communicator,
        selection: &Arc<Selection>,
        options: &'a TuneOptions,
    ) -> Result<Self, CollectiveError> {
        let started = Instant::now();
        let TuneOptions {
            collective,
            dtype,
            op,
            max_bytes,
            ..
        } = *options;
        let world_size = communicator.world_size();
        let (i, o) = blocks(collective, world_size);
        let (input, output) = (max_bytes * u64::from(i), max_bytes * u64::from(o));
        let mut prepare = CollectiveOptions::new(dtype, op, max_bytes).in_place(false);
        let on_cpu = matches!(communicator.device(), hal::Device::Cpu);
        let buffers = match options.place {
            Place::Private if on_cpu => {
                Buffers::Host(vec![BYTE; input as usize], vec![0; output as usize])
            }
            Place::Private => {
                let allocate = |bytes| communicator.device().allocate(bytes).map(Arc::new);
                Buffers::Device(allocate(input)?, allocate(output)?)
            }
            _ => {
                let input = communicator.allocate(input)?;
                let output = communicator.allocate(output)?;
                prepare = prepare.symmetric(&input, &output);
                Buffers::Symmetric(input)
            }
        };
        let data = vec![BYTE; input as usize];
        // What graphs repeat is not written anew.
        match &buffers {
            Buffers::Symmetric(buffer) if !on_cpu => buffer.write(0, &data)?,
            Buffers::Device(buffer, _) => buffer.write(0, &data)?,
            _ => {}
        }
        let request = Request::new(communicator, collective, &prepare);
        let mut contestants = Vec::new();
        let mut measured = Vec::new();
        for entry in selection.registry().entries(&request) {
            let Ok(most @ 1..) = entry.most else {
                continue;
            };
            // What is measured with one root holds for all.
            let any = collective_named(collective.name(), 0).unwrap_or(collective);
            let plan = entry.candidate.plan(any, world_size, 1)?;
            let column = measured.len();
            let mut prepared = Vec::new();
            for (least, most) in forms(&entry.candidate, &request, most) {
                let piece = entry.candidate.piece(&request, most).min(most);
                let only = Selector::of(
                    vec![Choice {
                        algorithm: entry.candidate.clone(),
                        up_to: most,
                        piece,
                        blocks: entry.blocks,
                        reason: "measured".into(),
                    }],
                    Vec::new(),
                );
                let chosen = (only, Arc::clone(selection));
                let prepare = prepare.clone();
                let call =
                    PreparedCollective::with_selector(communicator, collective, prepare, chosen);
                match call {
                    Ok(call) => prepared.push(Contestant {
                        entry: entry.clone(),
                        column,
                        least,
                        most,
                        call,
                        behind: f64::INFINITY,
                        far: 0,
                    }),
                    Err(error) if cannot_run(&error) => {
                        tracing::debug!("{} is not measured: {error}", entry.candidate);
                    }
                    Err(error) => return Err(error),
                }
            }
            if !prepared.is_empty() {
                contestants.append(&mut prepared);
                let hash = plan.content_hash();
                measured.push(Measured::new(&entry.candidate, entry.blocks, hash));
            }
        }
        let line = CollectiveOptions::new(DataType::U64, ReduceOp::Sum, 8)
            .algorithm(crate::Algorithm::OneShot);
        let gate = communicator.all_reduce(line)?;
        let gate_memory = match on_cpu {
            true => None,
            false => Some(communicator.device().allocate(8)?),
        };
        Ok(Self {
            measurements: Measurements::new(&request, measured),
            communicator,
            options,
            contestants,
            buffers,
            data,
            gate: (gate, gate_memory),
            started,
            spent: Duration::ZERO,
            disturbed: 0,
            timed: 0,
        })
    }

    /// Measures one size; `left` are those that are left, this one included.
    fn size(&mut self, bytes: u64, left: usize) -> Result<(), CollectiveError> {
        let fits: Vec<usize> = (0..self.contestants.len())
            .filter(|index| self.contestants[*index].takes(bytes))
            .collect();
        let calls = self.calls(&fits, bytes)?;
        // Making graphs must not wait for kernels of ranks on the same device that wait for this one.
        self.communicator.barrier()?;
        let all: Vec<_> = calls.iter().map(Option::as_ref).collect();
        let begun = Instant::now();
        let mut times = self.turns(&all, &fits, bytes, LEAST_CALLS)?;
        let (first, [took, spent]) =
            self.gather(&times, [begun.elapsed(), self.started.elapsed()])?;
        self.spent = spent;
        // By the shortest call: others may have been disturbed.
        let shortest: Vec<f64> = first.iter().map(|times| least(times)).collect();
        let best = least(&shortest);
        let near: Vec<usize> = fits
            .iter()
            .zip(&shortest)
            .filter(|(_, us)| **us <= NEAR * best)
            .map(|(index, _)| *index)
            .collect();
        let usual = first
            .iter()
            .find(|times| least(times) <= best)
            .map_or(best, |times| median(times));
        for (index, us) in fits.iter().zip(&shortest) {
            let contestant = &mut self.contestants[*index];
            let before = std::mem::replace(&mut contestant.behind, us / usual);
            contestant.far = match contestant.behind > FAR && contestant.behind > before {
                true => contestant.far + 1,
                false => 0,
            };
        }
        // Of what all ranks know alike, so that all make as many calls.
        let share = self.options.budget.saturating_sub(spent) / left.max(1) as u32;
        let turn =
            took.as_secs_f64() / LEAST_CALLS as f64 * near.len() as f64 / fits.len().max(1) as f64;
        let more = (share.as_secs_f64() / turn.max(1e-7)) as usize;
        let more = more.min(MOST_CALLS - LEAST_CALLS);
        if near.len() > 1 && more > 0 {
            let those = fits.iter().zip(all);
            let calls: Vec<_> = those
                .filter(|(index, _)| near.contains(index))
                .map(|(_, call)| call)
                .collect();
            let extra = self.turns(&calls, &near, bytes, more)?;
            for (index, extra) in near.iter().zip(extra) {
                let at = fits.iter().position(|fit| fit == index).unwrap_or(0);
                times[at].extend(extra);
            }
        }
        let (times, _) = self.gather(&times, [Duration::ZERO; 2])?;
        let mut us = vec![None; self.measurements.candidates.len()];
        for (index, times) in fits.iter().zip(&times) {
            let median = median(times);
            self.timed += 1;
            self.disturbed += usize::from(median > 2.0 * least(times));
            // No more digits than mean anything.
            let rounded = (median * 1e3).round() / 1e3;
            us[self.contestants[*index].column] =
                Some(rounded).filter(|us| us.is_finite() && *us > 0.0);
        }
        self.measurements.rows.push(Row { bytes, us });
        Ok(())
    }

    /// How each of those is called.
    fn calls(&self, those: &[usize], bytes: u64) -> Result<Vec<Option<Recorded>>, CollectiveError> {
        let on_cpu = matches!(self.communicator.device(), hal::Device::Cpu);
        let graph = |index: &usize| {
            let (call, places) = (&self.contestants[*index].call, &[(0, 0)]);
            let calls = if bytes < 1 << 20 { 20 } else { 5 };
            let recorded = match &self.buffers {
                Buffers::Device(from, to) => call.record_at((from, to), places, bytes, calls)?,
                Buffers::Symmetric(_) if !on_cpu => call.record_symmetric(places, bytes, calls)?,
                _ => return Ok(None),
            };
            Ok(Some(recorded))
        };
        those.iter().map(graph).collect()
    }

    /// Has those take turns, so many times each; returns the times of each in microseconds.
    fn turns(
        &mut self,
        calls: &[Option<&Recorded>],
        those: &[usize],
        bytes: u64,
        turns: usize,
    ) -> Result<Vec<Vec<f64>>, CollectiveError> {
        let mut times = vec![Vec::with_capacity(turns); those.len()];
        for turn in 0..=turns {
            for ((index, call), times) in those.iter().zip(calls).zip(&mut times) {
                let time = self.time(*index, *call, bytes)?;
                // The first warms it up.
                if turn > 0 {
                    times.push(time.as_secs_f64() * 1e6);
                }
            }
        }
        Ok(times)
    }

    fn time(
        &mut self,
        index: usize,
        graph: Option<&Recorded>,
        bytes: u64,
    ) -> Result<Duration, CollectiveError> {
        if let Some(recorded) = graph {
            // It begins with a call that lines the ranks up.
            let limit = self.communicator.timeout();
            return Ok(recorded.start()?.finish(limit)?);
        }
        let world_size = self.communicator.world_size();
        let (i, o) = self.options.collective.blocks(world_size).unwrap_or((1, 1));
        let (input, output) = (
            (bytes * u64::from(i)) as usize,
            (bytes * u64::from(o)) as usize,
        );
        let data = &self.data[..input];
        match &mut self.buffers {
            Buffers::Host(buffer, _) => buffer[..input].copy_from_slice(data),
            Buffers::Symmetric(buffer) => buffer.write(0, data)?,
            Buffers::Device(buffer, _) => buffer.write(0, data)?,
        }
        match &self.gate {
            (gate, None) => gate.run_in_place(&mut [0; 8])?,
            (gate, Some(memory)) => gate.run_at((memory, 0), (memory, 0), 8)?,
        }
        let call = &self.contestants[index].call;
        let start = Instant::now();
        match &mut self.buffers {
            Buffers::Host(from, to) => call.run(&from[..input], &mut to[..output])?,
            Buffers::Symmetric(_) => call.run_symmetric(0, 0, bytes)?,
            Buffers::Device(from, to) => call.run_at((from, 0), (to, 0), bytes)?,
        }
        Ok(start.elapsed())
    }

    /// Each call's time on the slowest rank, and the longest of each of `durations`.
    fn gather(
        &self,
        times: &[Vec<f64>],
        durations: [Duration; 2],
    ) -> Result<(Vec<Vec<f64>>, [Duration; 2]), CollectiveError> {
        let durations = durations.map(|duration| duration.as_secs_f64());
        let own: Vec<f64> = durations
            .iter()
            .chain(times.iter().flatten())
            .copied()
            .collect();
        let payload: Vec<u8> = own.iter().flat_map(|time| time.to_le_bytes()).collect();
        let mut longest = vec![0.0_f64; own.len()];
        for rank in self.communicator.all_gather_bytes(&payload)? {
            for (longest, word) in longest.iter_mut().zip(rank.chunks_exact(8)) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(word);
                *longest = longest.max(f64::from_le_bytes(bytes));
            }
        }
        let mut rest = longest.split_off(durations.len()).into_iter();
        let slowest = times
            .iter()
            .map(|of| rest.by_ref().take(of.len()).collect());
        let seconds = |at: usize| Duration::try_from_secs_f64(longest[at]).unwrap_or_default();
        Ok((slowest.collect(), [seconds(0), seconds(1)]))
    }
}

impl Contestant {
    /// Whether it is measured at that size.
    fn takes(&self, bytes: u64) -> bool {
        self.far < FAR_SIZES
            && (self.least..=self.most).contains(&bytes)
            && self.entry.candidate.takes(bytes)
    }
}

/// For which sizes a candidate has to be prepared apart, up to `most`.
fn forms(candidate: &Candidate, request: &Request, most: u64) -> Vec<(u64, u64)> {
    match candidate.form_changes(request) {
        Some(at) if at <= most => vec![(0, at - GRANULE), (at, most)],
        _ => vec![(candidate.worth_from(request.device), most)],
    }
}

/// Whether a candidate does not fit this machine, as all ranks find alike.
fn cannot_run(error: &CollectiveError) -> bool {
    use crossweft_channel::ChannelError;
    matches!(
        error,
        CollectiveError::Executor(
            ExecutorError::Residency { .. }
                | ExecutorError::Operands { .. }
                | ExecutorError::Channel {
                    source: ChannelError::PeerFailed { .. },
                    ..
                }
        )
    )
}

fn least(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_between_powers_of_two_are_measured() {
        let all = sizes(4, 1 << 20);
        assert_eq!(&all[..4], [8, 16, 32, 64]);
        for bytes in [8 << 10, 10 << 10, 14 << 10, 112 << 10, 448 << 10, 1 << 20] {
            assert!(all.contains(&bytes), "{bytes}");
        }
        assert!(all.is_sorted_by(|a, b| a < b));
        assert_eq!(sizes(8, 100), [8, 16, 32, 64, 96]);
        assert_eq!(sizes(2, 6), [6]);
        assert!(sizes(4, 3).is_empty());
        assert!(sizes(1, 0).is_empty());
    }

    #[test]
    fn the_median_is_no_outlier() {
        assert!((median(&[9.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!(median(&[]).is_infinite());
    }
}
