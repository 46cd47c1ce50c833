//! Choices for a request: what was measured on this machine, else the shipped rule; and where a plan of the user's was
//! not measured, what the cost model says of it.
//!
//! The same table, plans and request give the same choices on every rank; and a size takes the same, however large the
//! messages are that a collective is prepared for.

use std::borrow::Cow;

use crossweft_executor::{fused_form, has_lines};
use crossweft_plan::Plan;
use crossweft_plan::cost::{Topology, predict};

use crate::candidate::{Candidate, DeviceKind, Request};
use crate::registry::{Entry, Registry};
use crate::selector::{Choice, Selector};
use crate::table::{Measurements, Row, TuningTable};

/// What the shipped rule takes keeps its place against one that is not faster than by this, and so does the winner of the
/// size before: two that are as good as each other would take turns, and each is a plan with memory of its own.
const WORTH_A_CHANGE: f64 = 0.97;

/// More than any message has.
pub(crate) const LARGEST: u64 = 1 << 40;

/// The choices for a request.
pub(crate) fn choose(
    request: &Request,
    registry: &Registry,
    table: Option<&TuningTable>,
) -> Selector {
    let max_bytes = request.max_bytes;
    // Chosen for all sizes, of which those are kept that are asked for.
    let whole = &Request {
        max_bytes: max_bytes.max(LARGEST),
        ..request.clone()
    };
    let cut = |choices| up_to(choices, max_bytes);
    let without = measured(whole, &Registry::new(), table);
    if registry.plans().is_empty() {
        return Selector::of(cut(without), Vec::new());
    }
    let with = measured(whole, registry, table);
    let with = cut(predicted(with, max_bytes, whole, registry, table));
    let without = cut(without);
    let otherwise = match with
        .iter()
        .all(|choice| choice.algorithm.built_in().is_some())
    {
        true => Vec::new(),
        false => without,
    };
    Selector::of(with, otherwise)
}

/// The choices for sizes up to `most`.
fn up_to(mut choices: Vec<Choice>, most: u64) -> Vec<Choice> {
    let last = choices.iter().position(|choice| choice.up_to >= most);
    choices.truncate(last.map_or(choices.len(), |last| last + 1));
    if let Some(last) = choices.last_mut() {
        last.up_to = last.up_to.min(most);
        last.piece = last.piece.min(most);
    }
    choices
}

/// The shipped rule.
pub(crate) fn shipped(request: &Request) -> Selector {
    let Request {
        collective,
        world_size,
        place,
        max_bytes,
        most_blocks,
        ..
    } = *request;
    match request.device {
        DeviceKind::Cpu => Selector::new(collective, world_size, place, max_bytes),
        DeviceKind::Cuda => Selector::for_gpus(collective, world_size, place, max_bytes)
            .with_most_blocks(most_blocks),
    }
}

/// What was measured, and the shipped rule for other sizes.
pub(crate) fn measured(
    request: &Request,
    registry: &Registry,
    table: Option<&TuningTable>,
) -> Vec<Choice> {
    let shipped = shipped(request);
    let Some(found) = table.and_then(|table| table.find(request)) else {
        return shipped.choices().to_vec();
    };
    let contest = Contest::new(request, registry, found);
    let mut choices: Vec<Choice> = Vec::new();
    let mut up_to = 0;
    let mut winner = None;
    for row in &found.rows {
        if up_to >= request.max_bytes {
            break;
        }
        let below = row.bytes.min(request.max_bytes);
        let usual = &shipped.all()[shipped.select(below)];
        winner = contest.winner(row, [contest.index(usual), winner]);
        match winner.and_then(|index| contest.choice(row, index, below)) {
            Some(choice) => append(&mut choices, choice, request),
            None => rest(shipped.choices(), up_to, below)
                .for_each(|choice| append(&mut choices, choice, request)),
        }
        up_to = below;
    }
    if up_to < request.max_bytes || choices.is_empty() {
        rest(shipped.choices(), up_to, request.max_bytes)
            .for_each(|choice| append(&mut choices, choice, request));
    }
    choices
}

/// The choices for sizes above `from` up to `to`.
fn rest(choices: &[Choice], from: u64, to: u64) -> impl Iterator<Item = Choice> {
    // All sizes may be 0.
    let first = choices.iter().position(|c| c.up_to > from || from == to);
    let last = choices.iter().position(|c| c.up_to >= to);
    let end = last.map_or(choices.len(), |last| last + 1);
    let those = choices.get(first.unwrap_or(end)..end).unwrap_or_default();
    those.iter().map(move |choice| {
        let up_to = choice.up_to.min(to);
        Choice {
            up_to,
            piece: choice.piece.min(up_to),
            ..choice.clone()
        }
    })
}

/// Neighbours that are the same, and send messages in the same form, become one.
fn append(choices: &mut Vec<Choice>, choice: Choice, request: &Request) {
    let is_same = |last: &Choice| {
        let form = |of: &Choice| {
            let changes = of.algorithm.form_changes(request);
            changes.is_some_and(|at| of.up_to >= at)
        };
        let (a, b) = (last, &choice);
        (&a.algorithm, a.blocks, form(a)) == (&b.algorithm, b.blocks, form(b))
    };
    match choices.last_mut() {
        Some(last) if is_same(last) => {
            let piece = last.piece.max(choice.piece);
            *last = Choice { piece, ..choice };
        }
        _ => choices.push(choice),
    }
}

/// Who may win a measurement's rows.
struct Contest<'a> {
    request: &'a Request,
    measurements: &'a Measurements,
    /// By measured candidate: what it is, if it may be chosen.
    allowed: Vec<Option<Entry>>,
}

impl<'a> Contest<'a> {
    fn new(request: &'a Request, registry: &Registry, measurements: &'a Measurements) -> Self {
        let entries = registry.entries(request);
        let allowed = measurements.candidates.iter().map(|measured| {
            let candidate = measured.candidate(request.collective, registry)?;
            let is_it =
                |entry: &&Entry| (&entry.candidate, entry.blocks) == (&candidate, measured.blocks);
            entries.iter().find(is_it).cloned()
        });
        Self {
            request,
            measurements,
            allowed: allowed.collect(),
        }
    }

    /// Which of the measured candidates a choice is, if it may win.
    fn index(&self, choice: &Choice) -> Option<usize> {
        let is_it =
            |entry: &Entry| (&entry.candidate, entry.blocks) == (&choice.algorithm, choice.blocks);
        let mut allowed = self.allowed.iter();
        allowed.position(|entry| entry.as_ref().is_some_and(is_it))
    }

    /// The fastest in a row, unless it is hardly faster than one of those.
    fn winner(&self, row: &Row, unless: [Option<usize>; 2]) -> Option<usize> {
        let of = |index: usize| {
            let entry = self.allowed[index].as_ref()?;
            let fits = entry
                .most
                .is_ok_and(|most| row.bytes.min(self.request.max_bytes) <= most);
            row.us[index].filter(|_| fits).map(|us| (index, us))
        };
        let best = (0..row.us.len())
            .filter_map(of)
            .min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let as_good = |(_, us): &(usize, f64)| best.1 > us * WORTH_A_CHANGE;
        let stays = unless.into_iter().flatten().filter_map(of).find(as_good);
        Some(stays.unwrap_or(best).0)
    }

    fn choice(&self, row: &Row, index: usize, up_to: u64) -> Option<Choice> {
        let entry = self.allowed[index].as_ref()?;
        let may_win = |other: usize| {
            let entry = self.allowed[other].as_ref();
            entry.is_some_and(|entry| entry.most.is_ok())
        };
        Some(Choice {
            algorithm: entry.candidate.clone(),
            up_to,
            piece: entry.candidate.piece(self.request, up_to).min(up_to),
            blocks: entry.blocks,
            reason: Cow::Owned(reason(self.measurements, row, index, may_win)),
        })
    }
}

/// That the candidate of that index was measured, in words, with the next best of those that may be chosen.
pub(crate) fn reason(
    measurements: &Measurements,
    row: &Row,
    index: usize,
    may_win: impl Fn(usize) -> bool,
) -> String {
    let us = |index: usize| row.us[index].unwrap_or(f64::INFINITY);
    let second = (0..row.us.len())
        .filter(|other| *other != index && us(*other).is_finite() && may_win(*other))
        .min_by(|a, b| us(*a).total_cmp(&us(*b)));
    let second = second.map_or_else(String::new, |other| {
        let candidates = &measurements.candidates;
        let (measured, us) = (&candidates[other], us(other));
        let alike = candidates.iter().filter(|one| one.name == measured.name);
        let blocks = match alike.count() {
            1 => String::new(),
            _ => format!(" of {} blocks", measured.blocks),
        };
        format!(", {}{blocks} {us:.2}", measured.name)
    });
    let how = match measurements.is_shipped {
        true => "measured on another such machine",
        false => "measured",
    };
    format!("{how}: {:.2} us at {} B{second}", us(index), row.bytes)
}

/// The machine that the cost model takes a device for, where plans have kernels of their own if it has any.
pub(crate) fn topology(device: DeviceKind) -> Topology {
    match device {
        DeviceKind::Cpu => Topology::cpu(),
        DeviceKind::Cuda => Topology::h200(),
    }
}

/// The same for a plan that is prepared for messages of up to `bytes` bytes.
fn topology_of(device: DeviceKind, plan: &Plan, bytes: u64) -> Topology {
    let has_kernel = || (0..plan.world_size()).all(|rank| fused_form(plan, rank).is_some());
    match device {
        DeviceKind::Cuda if !has_kernel() => Topology::h200_executor(),
        DeviceKind::Cuda if has_lines(plan, bytes) => topology(device).with_lines(),
        _ => topology(device),
    }
}

/// Microseconds that the cost model says a message of `bytes` bytes takes, in pieces of `piece`.
pub(crate) fn predicted_us(device: DeviceKind, plan: &Plan, bytes: u64, piece: u64) -> Option<f64> {
    let piece = piece.clamp(1, bytes.max(1));
    let topology = topology_of(device, plan, piece);
    let us = |bytes| predict(plan, &topology, bytes).ok()?.total_us;
    let (whole, last) = (bytes / piece, bytes % piece);
    let last = if last == 0 { Some(0.0) } else { us(last) };
    Some(us(piece)? * whole as f64 + last?)
}

/// Plans that were not measured take the places where the cost model says that they are faster, as far as sizes up to
/// `most` go; there may be no choices for larger ones.
fn predicted(
    choices: Vec<Choice>,
    most: u64,
    request: &Request,
    registry: &Registry,
    table: Option<&TuningTable>,
) -> Vec<Choice> {
    /// The model is looked at for sizes up to this: what follows is as the last.
    const MOST: u64 = 1 << 30;
    let found = table.and_then(|table| table.find(request));
    let was_measured = |hash: &str| {
        found.is_some_and(|m| m.candidates.iter().any(|measured| measured.plan == hash))
    };
    let entries = registry.entries(request);
    // For all plans the same, so that what follows them is of no account.
    let mut sizes: Vec<u64> = (3..=MOST.ilog2()).map(|power| 1 << power).collect();
    sizes.extend(choices.iter().map(|choice| choice.up_to));
    let plans = entries.iter().filter(|e| e.candidate.built_in().is_none());
    sizes.extend(plans.filter_map(|entry| entry.most.ok()));
    sizes.sort_unstable();
    sizes.dedup();
    let enough = sizes.iter().position(|size| *size >= most);
    sizes.truncate(enough.map_or(sizes.len(), |last| last + 1));
    let mut choices = choices;
    for entry in entries {
        let (Candidate::Plan(plan), Ok(most)) = (&entry.candidate, entry.most) else {
            continue;
        };
        if was_measured(plan.hash()) {
            continue;
        }
        let mut better = Vec::new();
        for &size in &sizes {
            let Some(choice) = choices.iter().find(|choice| size <= choice.up_to) else {
                break;
            };
            let choice = Choice {
                up_to: size,
                piece: choice.piece.min(size),
                ..choice.clone()
            };
            let multiple = plan.constraints().multiple_of;
            let whole = size / multiple * multiple;
            let takes = size <= most && whole > 0 && entry.candidate.takes(whole);
            let times = takes.then(|| {
                let current = choice
                    .algorithm
                    .plan(request.collective, request.world_size, choice.blocks)
                    .ok()?;
                let us =
                    |plan: &Plan, piece| predicted_us(request.device, plan, whole.min(MOST), piece);
                Some((us(plan.plan(), whole)?, us(&current, choice.piece)?))
            });
            match times.flatten() {
                Some((its, current)) if its < current => append(
                    &mut better,
                    Choice {
                        reason: Cow::Owned(format!(
                            "not measured; the cost model says {its:.2} us at {whole} B, {current:.2} of {}",
                            choice.algorithm
                        )),
                        algorithm: entry.candidate.clone(),
                        up_to: size,
                        piece: size,
                        blocks: entry.blocks,
                    },
                    request,
                ),
                _ => append(&mut better, choice, request),
            }
        }
        if !better.is_empty() {
            choices = better;
        }
    }
    choices
}
