//! How tokens travel and how they are laid out.

use std::fmt;

use crossweft_device::DataType;
use crossweft_device::moe::{GROUP, Geometry, Placement};

/// How received tokens are laid out. Each rank may have its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// A row for each local expert that a token is for: `[local experts, ranks * max tokens, hidden]`. Each expert's
    /// rows stand at the beginning of its part, by source rank and then token; what follows them is left as it was.
    ExpertMajor,
    /// The same without gaps, each expert's rows followed by rows of zeros up to a multiple of `alignment`:
    /// `[rows, hidden]`.
    ExpertPacked {
        /// At least 1.
        alignment: u32,
    },
    /// A row for each token: `[ranks, max tokens, hidden]`. The caller's experts sum what is for several of them.
    RankMajor,
    /// The same without gaps, by source rank and then token: `[rows, hidden]`.
    Flat,
}

impl Layout {
    /// Whether a token has a row for each of its experts here.
    #[must_use]
    pub const fn is_by_expert(self) -> bool {
        self.placement().is_by_expert()
    }

    pub(crate) const fn placement(self) -> Placement {
        match self {
            Self::ExpertMajor => Placement::ExpertMajor,
            Self::ExpertPacked { .. } => Placement::ExpertPacked,
            Self::RankMajor => Placement::RankMajor,
            Self::Flat => Placement::Flat,
        }
    }

    pub(crate) const fn alignment(self) -> u32 {
        match self {
            Self::ExpertPacked { alignment } => alignment,
            _ => 1,
        }
    }
}

/// What the scales of quantised tokens are: one for each 128 elements, the last of a token perhaps for fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScaleType {
    /// f32.
    F32,
    /// The exponent of a power of two, plus 127, in a byte; a token's bytes are padded to a multiple of four, with zeros
    /// where it is quantised on the way, so that they are `i32` of four scales each, the first in the lowest bits.
    Ue8m0,
}

/// How tokens travel, and arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// In the group's type.
    Plain,
    /// In [`DataType::F8E4M3`], with scales.
    F8E4M3(ScaleType),
}

impl Format {
    /// Bytes of a token's elements.
    #[must_use]
    pub const fn token_bytes(self, hidden: u32, dtype: DataType) -> u64 {
        match self {
            Self::Plain => hidden as u64 * dtype.size() as u64,
            Self::F8E4M3(_) => hidden as u64,
        }
    }

    /// Bytes of a token's scales; 0 if it has none.
    #[must_use]
    pub const fn scale_bytes(self, hidden: u32) -> u64 {
        let groups = (hidden as u64).div_ceil(GROUP);
        match self {
            Self::Plain => 0,
            Self::F8E4M3(ScaleType::F32) => 4 * groups,
            Self::F8E4M3(ScaleType::Ue8m0) => groups.next_multiple_of(4),
        }
    }

    pub(crate) const fn number(self) -> u32 {
        match self {
            Self::Plain => 0,
            Self::F8E4M3(ScaleType::F32) => 1,
            Self::F8E4M3(ScaleType::Ue8m0) => 2,
        }
    }

    pub(crate) const fn of_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Plain),
            1 => Some(Self::F8E4M3(ScaleType::F32)),
            2 => Some(Self::F8E4M3(ScaleType::Ue8m0)),
            _ => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain tokens",
            Self::F8E4M3(ScaleType::F32) => "f8e4m3 tokens with f32 scales",
            Self::F8E4M3(ScaleType::Ue8m0) => "f8e4m3 tokens with ue8m0 scales",
        })
    }
}

/// The room that the output of a dispatch takes, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputShape {
    /// Rows: `local experts * ranks * max tokens`, `ranks * max tokens`, or the most that can come. Of a
    /// [`Layout::Flat`] or [`Layout::ExpertPacked`] fewer will do, see
    /// [`Handle::wait_for_counts`](crate::Handle::wait_for_counts).
    pub rows: u64,
    /// Bytes of a row's elements.
    pub row_bytes: u64,
    /// Bytes of a row's scales; 0 if there are none.
    pub scale_row_bytes: u64,
    /// Experts, with their weights, of a row: top-k, or 0 where rows are grouped by expert and have one weight.
    pub experts_per_row: u32,
}

impl OutputShape {
    pub(crate) fn new(
        geometry: &Geometry,
        own_experts: u32,
        (layout, top_k): (Layout, u32),
        (row_bytes, scale_row_bytes): (u64, u64),
    ) -> Self {
        let tokens = u64::from(geometry.ranks) * u64::from(geometry.max_tokens);
        let own = u64::from(own_experts);
        let rows = match layout {
            Layout::ExpertMajor => own * tokens,
            Layout::RankMajor | Layout::Flat => tokens,
            Layout::ExpertPacked { alignment } => {
                let alignment = u64::from(alignment);
                // Every token at as many experts as it can be, and every expert as full as it can be with padding.
                let pairs = tokens * u64::from(top_k).min(own) + own * (alignment - 1);
                pairs.min(own * tokens.next_multiple_of(alignment))
            }
        };
        Self {
            rows,
            row_bytes,
            scale_row_bytes,
            experts_per_row: if layout.is_by_expert() { 0 } else { top_k },
        }
    }

    /// The same for `rows` rows.
    #[must_use]
    pub const fn with_rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }

    /// Bytes of all rows' elements.
    #[must_use]
    pub const fn token_bytes(&self) -> u64 {
        self.rows * self.row_bytes
    }

    /// Bytes of all rows' scales.
    #[must_use]
    pub const fn scale_bytes(&self) -> u64 {
        self.rows * self.scale_row_bytes
    }

    /// Number of experts of all rows.
    #[must_use]
    pub const fn experts(&self) -> u64 {
        self.rows * self.experts_per_row as u64
    }

    /// Number of weights of all rows.
    #[must_use]
    pub const fn weights(&self) -> u64 {
        match self.experts_per_row {
            0 => self.rows,
            each => self.rows * each as u64,
        }
    }
}
