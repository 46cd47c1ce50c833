//! What a size takes, and why not something else.

use std::fmt;

use serde::Serialize;

use crate::candidate::{Candidate, Request};
use crate::choose::{predicted_us, reason, topology};
use crate::registry::Entry;
use crate::selection::Selection;
use crate::selector::{Choice, Place, Selector};
use crate::table::Row;

/// All candidates for one size.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The collective's name.
    pub collective: &'static str,
    /// Its root, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<u32>,
    /// Number of ranks.
    pub ranks: u32,
    /// What they compute on.
    pub device: &'static str,
    /// The element type.
    pub dtype: &'static str,
    /// The reduce operation, or `none`.
    pub op: &'static str,
    /// Where buffers lie.
    pub place: Place,
    /// Bytes of a message: one block of input or output.
    pub message_bytes: u64,
    /// The name of what is chosen.
    pub chosen: String,
    /// Why.
    pub reason: String,
    /// Where choices come from.
    pub source: String,
    /// The machine of the cost model.
    pub predicted_for: String,
    /// Bytes of the message that was measured, if one was: this size's, or the next larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<u64>,
    /// What was measured: type and operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_with: Option<String>,
    /// All candidates.
    pub candidates: Vec<Explained>,
}

/// One candidate.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Explained {
    /// Its name.
    pub name: String,
    /// Thread blocks of each rank.
    pub thread_blocks: u32,
    /// Where a plan of the user's came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Microseconds by the cost model; none where it cannot say.
    pub predicted_us: Option<f64>,
    /// Microseconds as measured, if it was.
    pub measured_us: Option<f64>,
    /// What became of it.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
}

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// It is what the size takes.
    Chosen,
    /// It could be.
    NotChosen,
    /// It could not.
    Refused,
}

impl Verdict {
    const fn name(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::NotChosen => "not chosen",
            Self::Refused => "refused",
        }
    }
}

impl Explanation {
    /// Explains the choice for a message of `bytes` bytes.
    #[must_use]
    pub fn new(request: &Request, bytes: u64, selection: &Selection) -> Self {
        let request = Request {
            max_bytes: request.max_bytes.max(bytes),
            ..request.clone()
        };
        Self::of(&request, bytes, selection, &selection.select(&request))
    }

    /// Explains what a selector has chosen.
    pub(crate) fn of(
        request: &Request,
        bytes: u64,
        selection: &Selection,
        selector: &Selector,
    ) -> Self {
        let choice = &selector.all()[selector.select(bytes)];
        let found = selection.table().and_then(|table| table.find(request));
        let row = found.and_then(|found| found.rows.iter().find(|row| bytes <= row.bytes));
        let times = found.zip(row);
        let index = |candidate: &Candidate, blocks: u32| {
            let (found, _) = times?;
            found.candidates.iter().position(|measured| {
                let known = measured.candidate(request.collective, selection.registry());
                measured.blocks == blocks && known.as_ref() == Some(candidate)
            })
        };
        let measured_us = |entry: &Entry| {
            let (_, row) = times?;
            row.us[index(&entry.candidate, entry.blocks)?]
        };
        let entries = selection.registry().entries(request);
        // The choice's own is that of the largest size it is for.
        let measured = || {
            let (found, row) = times?;
            let chosen = index(&choice.algorithm, choice.blocks)?;
            let may_win = |other: usize| {
                let it = |entry: &&Entry| index(&entry.candidate, entry.blocks) == Some(other);
                entries
                    .iter()
                    .find(it)
                    .is_some_and(|entry| entry.most.is_ok())
            };
            row.us[chosen].map(|_| reason(found, row, chosen, may_win))
        };
        let chosen_because = measured().unwrap_or_else(|| choice.reason.to_string());
        let predicted = |entry: &Entry| {
            let (collective, ranks) = (request.collective, request.world_size);
            let plan = entry.candidate.plan(collective, ranks, entry.blocks).ok()?;
            let piece = entry.candidate.piece(request, bytes);
            predicted_us(request.device, &plan, bytes, piece)
        };
        let mut candidates: Vec<(Explained, Entry)> = entries
            .into_iter()
            .map(|entry| {
                let (verdict, reason) = judge(&entry, (choice, &chosen_because), bytes);
                let explained = Explained {
                    name: entry.candidate.name().to_owned(),
                    thread_blocks: entry.blocks,
                    origin: match &entry.candidate {
                        Candidate::Plan(plan) => Some(plan.origin().to_owned()),
                        Candidate::BuiltIn(_) => None,
                    },
                    predicted_us: (verdict != Verdict::Refused)
                        .then(|| predicted(&entry))
                        .flatten(),
                    measured_us: measured_us(&entry),
                    verdict,
                    reason,
                };
                (explained, entry)
            })
            .collect();
        // The shipped rule may take numbers of thread blocks that nobody measures.
        if candidates
            .iter()
            .all(|(one, _)| one.verdict != Verdict::Chosen)
        {
            let entry = Entry {
                candidate: choice.algorithm.clone(),
                blocks: choice.blocks,
                most: Ok(choice.up_to),
            };
            let explained = Explained {
                name: choice.algorithm.name().to_owned(),
                thread_blocks: choice.blocks,
                origin: None,
                predicted_us: predicted(&entry),
                measured_us: None,
                verdict: Verdict::Chosen,
                reason: chosen_because.clone(),
            };
            candidates.insert(0, (explained, entry));
        }
        let candidates: Vec<Explained> = candidates.into_iter().map(|(one, _)| one).collect();
        Self {
            collective: request.collective.name(),
            root: request.collective.root(),
            ranks: request.world_size,
            device: request.device.name(),
            dtype: request.dtype.name(),
            op: match request.collective.reduces() {
                true => request.op.name(),
                false => "none",
            },
            place: request.place,
            message_bytes: bytes,
            chosen: choice.algorithm.name().to_owned(),
            reason: chosen_because,
            source: selection.source().to_owned(),
            predicted_for: topology(request.device).name,
            measured_bytes: row.map(|row: &Row| row.bytes),
            measured_with: times.map(|(found, _)| found.with()),
            candidates: with_reasons(candidates),
        }
    }

    /// As a JSON object with these fields.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Only maps with keys that are not strings cannot be written, and there are none.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The caller has chosen, not what the selection says.
    pub(crate) fn forced(mut self, choice: &Choice) -> Self {
        "the caller".clone_into(&mut self.source);
        self.reason = choice.reason.to_string();
        let chosen = |one: &&mut Explained| one.verdict == Verdict::Chosen;
        if let Some(one) = self.candidates.iter_mut().find(chosen) {
            one.reason.clone_from(&self.reason);
        }
        self
    }

    /// The candidate that is chosen.
    #[must_use]
    pub fn chosen(&self) -> Option<&Explained> {
        self.candidates
            .iter()
            .find(|one| one.verdict == Verdict::Chosen)
    }
}

fn judge(entry: &Entry, (choice, why): (&Choice, &str), bytes: u64) -> (Verdict, String) {
    if (&entry.candidate, entry.blocks) == (&choice.algorithm, choice.blocks) {
        return (Verdict::Chosen, why.to_owned());
    }
    let refused = |reason: String| (Verdict::Refused, reason);
    match entry.most {
        Err(refusal) => return refused(refusal.to_string()),
        Ok(most) if bytes > most => {
            return refused(format!(
                "it takes messages of up to {most} B: scratch memory is bounded"
            ));
        }
        Ok(_) => {}
    }
    if let Candidate::Plan(plan) = &entry.candidate
        && let Err(refusal) = plan.constraints().takes(bytes)
    {
        return refused(refusal.to_string());
    }
    (Verdict::NotChosen, String::new())
}

/// Says of those that could be chosen why they are not.
fn with_reasons(mut candidates: Vec<Explained>) -> Vec<Explained> {
    let chosen = candidates.iter().find(|one| one.verdict == Verdict::Chosen);
    let Some(chosen) = chosen.cloned() else {
        return candidates;
    };
    for one in candidates
        .iter_mut()
        .filter(|one| one.verdict == Verdict::NotChosen)
    {
        one.reason = match (one.measured_us, chosen.measured_us) {
            (Some(its), Some(least)) if its > least => {
                format!(
                    "{:.2} times as long as {}, as measured",
                    its / least,
                    chosen.name
                )
            }
            (Some(_), Some(_)) => format!("no faster for certain than {}", chosen.name),
            (Some(_), None) => format!("{} was not measured", chosen.name),
            (None, Some(_)) => "not measured at this size".to_owned(),
            (None, None) => match (&one.origin, one.predicted_us, chosen.predicted_us) {
                (Some(_), Some(its), Some(least)) => format!(
                    "{:.2} times as long as {}, by the cost model",
                    its / least,
                    chosen.name
                ),
                (Some(_), ..) => "the cost model does not say how long it takes".to_owned(),
                _ => "the shipped rule takes something else".to_owned(),
            },
        };
    }
    candidates
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            collective,
            ranks,
            device,
            dtype,
            op,
            place,
            message_bytes,
            chosen,
            reason,
            source,
            predicted_for,
            ..
        } = self;
        let root = self
            .root
            .map_or_else(String::new, |root| format!(" (root {root})"));
        writeln!(
            f,
            "{collective}{root} of {ranks} ranks on {device}, {dtype}{}, {place}, messages of \
             {message_bytes} B",
            if *op == "none" {
                String::new()
            } else {
                format!(" {op}")
            }
        )?;
        writeln!(f, "chosen: {chosen} ({reason})")?;
        writeln!(f, "choices come from {source}")?;
        let measured = match (&self.measured_bytes, &self.measured_with) {
            (Some(bytes), Some(with)) => format!("measured: messages of {bytes} B, {with}"),
            _ => "not measured".to_owned(),
        };
        writeln!(
            f,
            "predicted: by the cost model for {predicted_for}; {measured}"
        )?;
        let width = self.candidates.iter().map(|one| one.name.len()).max();
        let width = width.unwrap_or(0).max("candidate".len());
        writeln!(
            f,
            "{:<width$} {:>6} {:>12} {:>12}  {:<10}  why",
            "candidate", "blocks", "predicted", "measured", ""
        )?;
        for one in &self.candidates {
            let us =
                |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.2} us"));
            let origin = one.origin.as_ref();
            let origin = origin.map_or_else(String::new, |origin| format!(" [{origin}]"));
            writeln!(
                f,
                "{:<width$} {:>6} {:>12} {:>12}  {:<10}  {}{origin}",
                one.name,
                one.thread_blocks,
                us(one.predicted_us),
                us(one.measured_us),
                one.verdict.name(),
                one.reason
            )?;
        }
        Ok(())
    }
}
