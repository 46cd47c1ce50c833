//! Signals and waits, releases and acquires: as many of the one as of the other.

use std::collections::BTreeMap;

use super::order::{Name, names};
use super::program::Program;
use crate::check::{Code, Diagnostic};

/// The first counter whose signals and waits are not as many, and the index of the first instruction that is too
/// many. Counters that are used in loops and outside are left to the checker.
pub(super) fn unpaired(program: &Program) -> Option<(usize, Diagnostic)> {
    #[derive(Default)]
    struct Uses {
        signals: Vec<usize>,
        waits: Vec<usize>,
    }
    let instrs = &program.trace.instrs;
    let mut uses: BTreeMap<Name, Uses> = BTreeMap::new();
    for (index, instr) in instrs.iter().enumerate() {
        let (signals, waits) = names(program, &instr.raw);
        for name in signals {
            uses.entry(name).or_default().signals.push(index);
        }
        for name in waits {
            uses.entry(name).or_default().waits.push(index);
        }
    }
    let faults = uses.into_iter().filter_map(|(name, Uses { signals, waits })| {
        let in_loop = |index: &usize| instrs[*index].in_loop;
        let mut loops = signals.iter().chain(&waits).map(in_loop);
        let first = loops.next();
        if loops.any(|other| Some(other) != first) {
            return None;
        }
        let (sent, taken) = (signals.len(), waits.len());
        let surplus = if sent > taken {
            signals[taken]
        } else {
            *waits.get(sent)?
        };
        let (what, there) = match name {
            Name::Channel(from, to, kind, ordinal) => (
                format!(
                    "on {} channel {ordinal} from rank {from} to rank {to} there are {sent} signals and {taken} \
                     waits",
                    kind.name()
                ),
                format!("rank {}", if sent > taken { to } else { from }),
            ),
            Name::Semaphore(id) => {
                let rank = program.trace.semaphores[id as usize].rank;
                let what = format!(
                    "a semaphore of rank {rank} is released {sent} times and acquired {taken} times"
                );
                (what, format!("another thread block of rank {rank}"))
            }
        };
        let missing = match (name, sent > taken) {
            (Name::Channel(..), true) => "wait for this signal",
            (Name::Channel(..), false) => "send the signal that this waits for",
            (Name::Semaphore(_), true) => "acquire what is released here",
            (Name::Semaphore(_), false) => "release what is acquired here",
        };
        let diagnostic = Diagnostic {
            rank: Some(instrs[surplus].rank),
            thread_block: Some(instrs[surplus].block),
            op: None,
            inner: None,
            other: None,
            code: Code::Pairing,
            message: format!("{what}; let {there} {missing}"),
        };
        Some((surplus, diagnostic))
    });
    faults.min_by_key(|(index, _)| *index)
}
