//! Whether NVLink multicast may be used. Decided from the environment alone, before any symbol of
//! it is looked up.

use std::fmt;

/// Whether NVLink multicast may be used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Multicast {
    /// It may be, where the devices can.
    Allowed,
    /// It may not.
    Off {
        /// Why not, and how to turn it on.
        reason: String,
    },
}

/// The variable that must be `1` for multicast to be used.
const SWITCH: &str = "CROSSWEFT_MULTICAST";

/// Variables of others by which a machine's operators keep multicast off, with the value that does.
const VETOES: [(&str, &str); 3] = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
];

impl Multicast {
    /// Decides by the environment of this process.
    #[must_use]
    pub fn from_environment() -> Self {
        Self::decide(|name| {
            let value = std::env::var_os(name)?;
            Some(value.to_string_lossy().into_owned())
        })
    }

    /// Decides by an environment: `variable` gives the value of a name, if it is set.
    #[must_use]
    pub fn decide(variable: impl Fn(&str) -> Option<String>) -> Self {
        let is = |name, wanted| variable(name).is_some_and(|value| value.trim() == wanted);
        if !is(SWITCH, "1") {
            return Self::Off {
                reason: format!("it is opt-in; set {SWITCH}=1 to allow it"),
            };
        }
        match VETOES.into_iter().find(|&(name, value)| is(name, value)) {
            None => Self::Allowed,
            Some((name, value)) => Self::Off {
                reason: format!("{name}={value} forbids it, which outweighs {SWITCH}=1"),
            },
        }
    }

    /// Whether it may be used.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }
}

impl fmt::Display for Multicast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed => write!(f, "allowed by {SWITCH}=1"),
            Self::Off { reason } => write!(f, "off: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_the_switch_and_no_veto() {
        let decide = |set: &[(&str, &str)]| {
            Multicast::decide(|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let on = (SWITCH, "1");
        assert!(!decide(&[]).is_allowed());
        assert!(!decide(&[(SWITCH, "0")]).is_allowed());
        assert!(!decide(&[(SWITCH, "yes")]).is_allowed());
        assert!(decide(&[on]).is_allowed());
        for veto in VETOES {
            assert!(!decide(&[on, veto]).is_allowed(), "{veto:?}");
            assert!(!decide(&[veto]).is_allowed(), "{veto:?}");
            let reason = decide(&[on, veto]).to_string();
            assert!(reason.contains(veto.0), "{reason}");
        }
        let harmless = [
            ("NCCL_NVLS_ENABLE", "1"),
            ("NVSHMEM_DISABLE_NVLS", "0"),
            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
        ];
        assert!(decide(&[&[on], &harmless[..]].concat()).is_allowed());
    }
}
