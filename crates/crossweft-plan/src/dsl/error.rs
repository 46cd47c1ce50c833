//! What can be wrong with a program, and where.

use std::fmt;
use std::sync::Arc;

use crate::check::Diagnostic;
use crate::plan::Buffer;
use crate::validate::PlanError;

/// A line of the user's program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The file.
    pub file: Arc<str>,
    /// The line, from 1.
    pub line: u32,
}

impl Source {
    /// Line `line` of `file`.
    #[must_use]
    pub fn new(file: &str, line: u32) -> Self {
        Self {
            file: file.into(),
            line,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Why a program is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options make no program.
    #[error("{reason}")]
    Options {
        /// What is wrong with them.
        reason: String,
    },
    /// An instruction has wrong arguments.
    #[error("{at}: {misuse}")]
    Misuse {
        /// Where it is.
        at: Source,
        /// What is wrong with it.
        misuse: Misuse,
    },
    /// The operations make no sound plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The checker has found faults.
    #[error("the program `{program}` is not correct:{}", lines(.faults))]
    Faults {
        /// The program's name.
        program: String,
        /// The faults; at least one.
        faults: Vec<Fault>,
    },
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(|fault| format!("\n  {fault}")).collect()
}

/// A fault that the checker has found, and the instruction that it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The line, if the fault is one instruction's.
    pub at: Option<Source>,
    /// The line of the other instruction, if the fault is a race of two.
    pub other: Option<Source>,
    /// The fault, in terms of the plan.
    pub diagnostic: Diagnostic,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        write!(f, "{}", self.diagnostic)?;
        match &self.other {
            Some(other) => write!(f, " [the other is at {other}]"),
            None => Ok(()),
        }
    }
}

/// What is wrong with an instruction's arguments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// There is no such rank.
    #[error("there is no rank {rank}; there are {ranks}, from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// World size.
        ranks: u32,
    },
    /// The chunks are not all in the buffer.
    #[error(
        "chunks {first} to {end} (exclusive) of the {} of rank {rank}, which has {have}", 
        buffer_name(*.buffer)
    )]
    OutOfRange {
        /// The rank.
        rank: u32,
        /// The buffer.
        buffer: Buffer,
        /// First chunk.
        first: u32,
        /// The one behind the last.
        end: u32,
        /// Chunks of the buffer.
        have: u32,
    },
    /// An instruction moves no chunks.
    #[error("the {role} has no chunks; name at least one")]
    Empty {
        /// Which operand.
        role: &'static str,
    },
    /// The operands are not of one size.
    #[error(
        "the {role} has {count} chunks, the first operand {source_count}; they must be as many"
    )]
    Sizes {
        /// Which operand.
        role: &'static str,
        /// Its chunks.
        count: u32,
        /// The first operand's.
        source_count: u32,
    },
    /// An operand is of the wrong rank.
    #[error("the {role} is of rank {rank}, but must be of rank {wanted}")]
    WrongRank {
        /// Which operand.
        role: &'static str,
        /// Its rank.
        rank: u32,
        /// The right one.
        wanted: u32,
    },
    /// An operand is in the wrong buffer.
    #[error(
        "the {role} is in the {}, but must be in {wanted}", 
        buffer_name(*.buffer)
    )]
    WrongBuffer {
        /// Which operand.
        role: &'static str,
        /// Its buffer.
        buffer: Buffer,
        /// Where it must be.
        wanted: &'static str,
    },
    /// The rank is not in the group.
    #[error("rank {rank} is not a member of the switch channel of ranks {members:?}")]
    NotAMember {
        /// The rank.
        rank: u32,
        /// The members.
        members: Vec<u32>,
    },
    /// This kind of channel cannot do it.
    #[error("a {kind} channel cannot {what}; use a {other} channel")]
    ChannelKind {
        /// The channel's kind.
        kind: &'static str,
        /// What it was to do.
        what: &'static str,
        /// The kind that can.
        other: &'static str,
    },
    /// A handle is of another program, or the number is too large.
    #[error("there is no such {what} in this program; make it with this program's own methods")]
    Unknown {
        /// What it is a handle of.
        what: &'static str,
    },
    /// There are no thread blocks, or one twice.
    #[error("thread blocks {blocks:?}: name at least one, and each once, below {limit}")]
    Blocks {
        /// Those given.
        blocks: Vec<u32>,
        /// Numbers must be smaller.
        limit: u32,
    },
    /// A number is too large.
    #[error("{number} {what}; at most {limit} fit")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        number: u64,
        /// How many can be.
        limit: u64,
    },
    /// It cannot be in a loop, or only there.
    #[error("{what}")]
    Loop {
        /// What and why.
        what: &'static str,
    },
    /// What it computes is known.
    #[error(
        "what a program of {collective} computes is known; only one of a custom collective says"
    )]
    NotCustom {
        /// The program's collective.
        collective: &'static str,
    },
    /// The input is written although it is only to be read.
    #[error("the input is not to be written, unless the program is in place")]
    WritesInput,
}

pub(super) const fn buffer_name(buffer: Buffer) -> &'static str {
    match buffer {
        Buffer::Input => "input",
        Buffer::Output => "output",
        Buffer::Scratch => "scratch memory",
        Buffer::Packets => "packet memory",
    }
}
