//! Parameters: the environment variables that there are, and what they are set to.

use std::ffi::{CStr, CString};

use crate::status::Error;
use crate::table;

/// A variable, and whether this library does something with it.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) key: &'static CStr,
    pub(crate) about: &'static str,
}

/// A count, and no variable.
const DELEGATED: &CStr = c"CROSSWEFT_NCCL_DELEGATED";
const NO_EFFECT: &str = "of NCCL; accepted, and without effect here";

const fn of_nccl(key: &'static CStr) -> Parameter {
    let about = NO_EFFECT;
    Parameter { key, about }
}

const fn own(key: &'static CStr, about: &'static str) -> Parameter {
    Parameter { key, about }
}

/// All that programs may ask for.
pub(crate) const ALL: &[Parameter] = &[
    own(
        c"CROSSWEFT_DEVICE",
        "whose memory pointers are in: cpu, cuda or auto",
    ),
    own(c"CROSSWEFT_NCCL_VERSION", "what ncclGetVersion says"),
    own(
        c"CROSSWEFT_NCCL_DELEGATE",
        "what another library does, as in all-reduce:1M-,reduce-scatter",
    ),
    own(c"CROSSWEFT_NCCL_LIB", "the other library"),
    Parameter {
        key: DELEGATED,
        about: "no variable: calls that it has done on the communicators that there are",
    },
    own(
        c"CROSSWEFT_TIMEOUT",
        "the longest any wait may take, in seconds",
    ),
    own(
        c"NCCL_DEBUG",
        "WARN or more prints errors on standard error",
    ),
    own(
        c"NCCL_CHECK_POINTERS",
        "1 looks at buffers before calls on a GPU",
    ),
    own(c"NCCL_COMM_BLOCKING", "0 or 1 overrides ncclConfig_t"),
    of_nccl(c"NCCL_ALGO"),
    of_nccl(c"NCCL_BUFFSIZE"),
    of_nccl(c"NCCL_CONF_FILE"),
    of_nccl(c"NCCL_CTA_POLICY"),
    of_nccl(c"NCCL_CUMEM_ENABLE"),
    of_nccl(c"NCCL_CUMEM_HOST_ENABLE"),
    of_nccl(c"NCCL_DEBUG_FILE"),
    of_nccl(c"NCCL_DEBUG_SUBSYS"),
    of_nccl(c"NCCL_GRAPH_REGISTER"),
    of_nccl(c"NCCL_IB_GID_INDEX"),
    of_nccl(c"NCCL_IB_HCA"),
    of_nccl(c"NCCL_IGNORE_CPU_AFFINITY"),
    of_nccl(c"NCCL_LAUNCH_MODE"),
    of_nccl(c"NCCL_LAUNCH_ORDER_IMPLICIT"),
    of_nccl(c"NCCL_MAX_CTAS"),
    of_nccl(c"NCCL_MAX_NCHANNELS"),
    of_nccl(c"NCCL_MIN_CTAS"),
    of_nccl(c"NCCL_MIN_NCHANNELS"),
    of_nccl(c"NCCL_MULTI_RANK_GPU_ENABLE"),
    of_nccl(c"NCCL_NO_CACHE"),
    of_nccl(c"NCCL_NTHREADS"),
    of_nccl(c"NCCL_NVLS_ENABLE"),
    of_nccl(c"NCCL_P2P_DISABLE"),
    of_nccl(c"NCCL_P2P_LEVEL"),
    of_nccl(c"NCCL_PROTO"),
    of_nccl(c"NCCL_RAS_ADDR"),
    of_nccl(c"NCCL_RAS_ENABLE"),
    of_nccl(c"NCCL_SET_THREAD_NAME"),
    of_nccl(c"NCCL_SHM_DISABLE"),
    of_nccl(c"NCCL_SOCKET_FAMILY"),
    of_nccl(c"NCCL_SOCKET_IFNAME"),
    of_nccl(c"NCCL_TOPO_FILE"),
];

impl Parameter {
    /// The one that `key` names, and its number, from 1 on.
    pub(crate) fn find(key: &str) -> Result<(u64, &'static Self), Error> {
        let found = (1..)
            .zip(ALL)
            .find(|(_, p)| p.key.to_bytes() == key.as_bytes());
        found.ok_or_else(|| Error::argument(format!("key is `{key}`, which is no parameter")))
    }

    /// The one with that number.
    pub(crate) fn numbered(number: u64) -> Result<&'static Self, Error> {
        let index = number.checked_sub(1).and_then(|n| usize::try_from(n).ok());
        let found = index.and_then(|index| ALL.get(index));
        found.ok_or_else(|| Error::argument("the handle is not of ncclParamBind"))
    }

    pub(crate) fn name(&self) -> String {
        self.key.to_string_lossy().into_owned()
    }

    /// What it is set to, if it is.
    pub(crate) fn value(&self) -> Option<String> {
        if self.key == DELEGATED {
            return Some(table::delegated().to_string());
        }
        std::env::var(self.name()).ok()
    }

    /// The value, or nothing, as C has it.
    pub(crate) fn text(&self) -> CString {
        // The environment has no zero bytes.
        CString::new(self.value().unwrap_or_default()).unwrap_or_default()
    }

    /// The value as a number; decimal, or hexadecimal after `0x`.
    pub(crate) fn integer<T: TryFrom<i128>>(&self) -> Result<T, Error> {
        let name = self.name();
        let Some(text) = self.value() else {
            return Err(Error::argument(format!("{name} is not set")));
        };
        let digits = text.trim();
        let number = match digits.strip_prefix("0x") {
            Some(digits) => i128::from_str_radix(digits, 16).ok(),
            None => digits.parse().ok(),
        };
        let fits = number.and_then(|number| T::try_from(number).ok());
        fits.ok_or_else(|| {
            Error::argument(format!(
                "{name} is `{text}`, which is no number of the type asked for"
            ))
        })
    }
}
