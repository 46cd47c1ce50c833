//! `ncclConfig_t` and `ncclCollConfig_t`: structures that grow from version to version.
//!
//! A caller's structure may be shorter or longer than the one known here. As NCCL does: what both have is
//! copied, and fields that are newer than the `version` in it count as not given.

use crate::pointer::{Text, Versioned};
use crate::settings;
use crate::status::Error;

/// What a structure made with NCCL's initializers has in its second field.
pub(crate) const MAGIC: u32 = 0xcafe_beef;
/// An integer that was not given.
pub(crate) const UNDEFINED: i32 = i32::MIN;

/// Bytes of `ncclConfig_t` in 2.32.
const CONFIG_BYTES: usize = 120;
/// Bytes of `ncclCollConfig_t` in 2.32.
const COLLECTIVE_BYTES: usize = 72;

/// The integers of `ncclConfig_t`: name, offset, version since which they are there, and the values that
/// may be given.
const FIELDS: [(&str, usize, u32, Values); 21] = [
    ("blocking", 16, 21400, Values::Flag),
    ("cgaClusterSize", 20, 21700, Values::FromZero),
    ("minCTAs", 24, 21700, Values::FromOne),
    ("maxCTAs", 28, 21700, Values::FromOne),
    ("splitShare", 40, 0, Values::Flag),
    ("trafficClass", 44, 22500, Values::Any),
    ("collnetEnable", 56, 22700, Values::Flag),
    ("CTAPolicy", 60, 22700, Values::UpTo(3)),
    ("shrinkShare", 64, 22700, Values::Flag),
    ("nvlsCTAs", 68, 22700, Values::FromOne),
    ("nChannelsPerNetPeer", 72, 22800, Values::FromOne),
    ("nvlinkCentricSched", 76, 22800, Values::Flag),
    ("graphUsageMode", 80, 22900, Values::UpTo(2)),
    ("numRmaCtx", 84, 22900, Values::FromZero),
    ("maxP2pPeers", 88, 23000, Values::FromOne),
    ("graphStreamOrdering", 92, 23005, Values::Flag),
    ("launchOrderImplicit", 96, 23100, Values::Any),
    ("numRmaSig", 100, 23100, Values::Any),
    ("rmaEagerInit", 104, 23100, Values::Any),
    ("hostCftMode", 108, 23100, Values::Any),
    ("nvlsHostMode", 112, 23200, Values::Any),
];
const COMM_NAME: usize = 48;

/// Which values a field may have.
#[derive(Clone, Copy, Debug)]
enum Values {
    Any,
    Flag,
    FromZero,
    FromOne,
    UpTo(i32),
}

impl Values {
    fn allow(self, value: i32) -> bool {
        match self {
            Self::Any => true,
            Self::Flag => matches!(value, 0 | 1),
            Self::FromZero => value >= 0,
            Self::FromOne => value >= 1,
            Self::UpTo(most) => (0..=most).contains(&value),
        }
    }
}

/// What a communicator was made with, as far as it matters here. How many thread blocks NCCL's kernels take,
/// and the like, is checked and otherwise of no account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Whether calls return when they are done.
    pub(crate) blocking: bool,
    /// What the program calls the communicator.
    pub(crate) name: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            blocking: settings::blocking().unwrap_or(true),
            name: None,
        }
    }
}

impl Config {
    /// Reads a caller's `ncclConfig_t`; NULL stands for `otherwise`.
    pub(crate) fn read(config: &Versioned, otherwise: Option<&Self>) -> Result<Self, Error> {
        if config.is_null() {
            return match otherwise {
                Some(parent) => Ok(parent.clone()),
                None => Ok(Self::default()),
            };
        }
        let (fields, version) =
            read::<CONFIG_BYTES>(config, "ncclConfig_t", "NCCL_CONFIG_INITIALIZER")?;
        let given = |offset: usize, since: u32| match integer(&fields.bytes, offset) {
            UNDEFINED => None,
            _ if offset + 4 > fields.given || version < since => None,
            value => Some(value),
        };
        for (name, offset, since, values) in FIELDS {
            if let Some(value) = given(offset, since).filter(|&value| !values.allow(value)) {
                return Err(Error::argument(format!(
                    "ncclConfig_t: {name} is {value}; {values:?} is allowed"
                )));
            }
        }
        let (least, most) = (given(24, 21700), given(28, 21700));
        if let (Some(least), Some(most)) = (least, most)
            && least > most
        {
            return Err(Error::argument(format!(
                "ncclConfig_t: minCTAs is {least} and maxCTAs only {most}"
            )));
        }
        let has_name = fields.given >= COMM_NAME + 8 && version >= 22500;
        let name = fields.bytes[COMM_NAME..COMM_NAME + 8].try_into();
        Ok(Self {
            blocking: settings::blocking().unwrap_or(given(16, 21400) != Some(0)),
            name: name
                .ok()
                .filter(|_| has_name)
                .and_then(|bytes| Text::of_field(bytes).read()),
        })
    }
}

/// Checks a caller's `ncclCollConfig_t`, which may be NULL. Its hints on NCCL's own algorithms can only
/// be followed where they leave the choice open.
pub(crate) fn check_collective(config: &Versioned) -> Result<(), Error> {
    if config.is_null() {
        return Ok(());
    }
    let what = "ncclCollConfig_t";
    let (fields, _) = read::<COLLECTIVE_BYTES>(config, what, "NCCL_COLLCONFIG_INITIALIZER")?;
    let pointer = |offset: usize| -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&fields.bytes[offset..offset + 8]);
        bytes
    };
    let selection = match fields.given {
        48.. => Text::of_field(pointer(40))
            .read()
            .filter(|text| !text.is_empty()),
        _ => None,
    };
    let forced = fields.given < 52 || integer(&fields.bytes, 48) != 0;
    if let Some(selection) = selection.filter(|_| forced) {
        return Err(Error::unsupported(
            &format!("algSelection `{selection}`, which names algorithms of NCCL's,"),
            "leave it NULL, or set forceAlgSelection to 0",
        ));
    }
    if fields.given >= 72 && pointer(64) != [0; 8] {
        return Err(Error::unsupported(
            "launchCompletionEvent",
            "leave it NULL, and record an event on the stream behind the call",
        ));
    }
    Ok(())
}

/// A structure as far as the caller has it; zeros beyond.
struct Fields<const N: usize> {
    bytes: [u8; N],
    given: usize,
}

fn read<const N: usize>(
    from: &Versioned,
    what: &str,
    initializer: &str,
) -> Result<(Fields<N>, u32), Error> {
    let mut bytes = [0; N];
    let size = from.read(what, &mut bytes)?;
    if size < 16 || integer(&bytes, 8).cast_unsigned() != MAGIC {
        return Err(Error::argument(format!(
            "{what} was not initialised with {initializer}"
        )));
    }
    let version = integer(&bytes, 12).cast_unsigned();
    let given = size.min(N);
    Ok((Fields { bytes, given }, version))
}

/// The integer at `offset`, which every caller of this module knows to lie inside.
fn integer(bytes: &[u8], offset: usize) -> i32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[offset..offset + 4]);
    i32::from_ne_bytes(number)
}
