//! The unique id: where the rendezvous is, and the secret that proves membership.
//!
//! | bytes    | what                                              |
//! |----------|---------------------------------------------------|
//! | 0..8     | `CROSSWFT`                                        |
//! | 8..10    | version, little-endian: 1                         |
//! | 10..12   | address family, little-endian: 4 or 6             |
//! | 12..28   | IP address in network order, IPv4 in the first 4  |
//! | 28..30   | port, little-endian                               |
//! | 30..32   | zero                                              |
//! | 32..48   | secret                                            |
//! | 48..128  | zero                                              |

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use crate::auth::Key;
use crate::error::NetError;

const MAGIC: &[u8; 8] = b"CROSSWFT";
const VERSION: u16 = 1;

/// What a rank needs to join a job. Whoever holds it can join, so pass it like a password.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    address: SocketAddr,
    key: Key,
}

impl UniqueId {
    /// An id with a new secret for a rendezvous at `address`.
    ///
    /// Only for whoever plans an address before the rendezvous listens there; otherwise ask
    /// [`Rendezvous::unique_id`](crate::Rendezvous::unique_id).
    pub fn generate(address: SocketAddr) -> Result<Self, NetError> {
        Ok(Self {
            address,
            key: Key::random()?,
        })
    }

    /// Where the rendezvous listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The id as bytes; they contain the secret.
    pub fn to_bytes(&self) -> [u8; 128] {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        match self.address.ip() {
            IpAddr::V4(ip) => {
                bytes[10] = 4;
                bytes[12..16].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[10] = 6;
                bytes[12..28].copy_from_slice(&ip.octets());
            }
        }
        bytes[28..30].copy_from_slice(&self.address.port().to_le_bytes());
        bytes[32..48].copy_from_slice(self.key.as_bytes());
        bytes
    }

    /// Parses what [`to_bytes`](Self::to_bytes) gave.
    pub fn from_bytes(bytes: &[u8; 128]) -> Result<Self, NetError> {
        let invalid = |reason: &str| NetError::InvalidUniqueId {
            reason: reason.to_owned(),
        };
        if &bytes[..8] != MAGIC {
            return Err(invalid("it does not start with the magic bytes"));
        }
        if u16::from_le_bytes([bytes[8], bytes[9]]) != VERSION {
            return Err(invalid("it was made by another version of crossweft"));
        }
        let mut ip = [0; 16];
        ip.copy_from_slice(&bytes[12..28]);
        let ip = match u16::from_le_bytes([bytes[10], bytes[11]]) {
            4 if ip[4..].iter().all(|&byte| byte == 0) => {
                IpAddr::V4(Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3]))
            }
            6 => IpAddr::V6(Ipv6Addr::from(ip)),
            _ => return Err(invalid("its address is neither IPv4 nor IPv6")),
        };
        let port = u16::from_le_bytes([bytes[28], bytes[29]]);
        if port == 0 {
            return Err(invalid("its port is 0"));
        }
        if bytes[30..32]
            .iter()
            .chain(&bytes[48..])
            .any(|&byte| byte != 0)
        {
            return Err(invalid("its padding is not zero"));
        }
        let mut secret = [0; 16];
        secret.copy_from_slice(&bytes[32..48]);
        Ok(Self {
            address: SocketAddr::new(ip, port),
            key: Key::new(secret),
        })
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// A public name of the job, which gives nothing of the secret away.
    pub(crate) fn tag(&self) -> [u8; 16] {
        let mut tag = [0; 16];
        tag.copy_from_slice(&self.key.mac(b"crossweft tag v1", &[&self.to_bytes()[..32]])[..16]);
        tag
    }
}

/// Lowercase hex, 256 characters; they contain the secret.
impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Hides the secret, because ids end up in logs.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl FromStr for UniqueId {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let text = text.trim().as_bytes();
        if text.len() != 256 {
            let reason = format!("it has {} characters instead of 256", text.len());
            return Err(NetError::InvalidUniqueId { reason });
        }
        let mut bytes = [0; 128];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            *byte = match (hex(pair[0]), hex(pair[1])) {
                (Some(high), Some(low)) => high << 4 | low,
                _ => {
                    let reason = "it contains something else than hexadecimal digits".to_owned();
                    return Err(NetError::InvalidUniqueId { reason });
                }
            };
        }
        Self::from_bytes(&bytes)
    }
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trip(ip: IpAddr, port in 1u16.., secret: [u8; 16]) {
            let id = UniqueId { address: SocketAddr::new(ip, port), key: Key::new(secret) };
            prop_assert_eq!(&UniqueId::from_bytes(&id.to_bytes()).unwrap(), &id);
            prop_assert_eq!(&id.to_string().parse::<UniqueId>().unwrap(), &id);
        }

        #[test]
        fn one_changed_byte_outside_the_fields_is_refused(
            index in (0usize..12).prop_union(48usize..128), change in 1u8..,
        ) {
            let id = UniqueId::generate("127.0.0.1:99".parse().unwrap()).unwrap();
            let mut bytes = id.to_bytes();
            bytes[index] ^= change;
            // The one change that makes another valid id: IPv4 zero-padded read as IPv6.
            prop_assume!(!(index == 10 && bytes[10] == 6));
            prop_assert!(UniqueId::from_bytes(&bytes).is_err());
        }

        #[test]
        fn any_text_is_an_id_or_an_error(text in ".{0,300}") {
            let _ = text.parse::<UniqueId>();
        }
    }

    #[test]
    fn malformed_text_is_refused() {
        let id = UniqueId::generate("[::1]:99".parse().unwrap()).unwrap();
        let text = id.to_string();
        assert_eq!(text.len(), 256);
        assert!(text[..255].parse::<UniqueId>().is_err());
        assert!(format!("{text}0").parse::<UniqueId>().is_err());
        assert!(format!("zz{}", &text[2..]).parse::<UniqueId>().is_err());
        assert!("".parse::<UniqueId>().is_err());
        assert!("é".repeat(128).parse::<UniqueId>().is_err());
    }

    #[test]
    fn debug_hides_the_secret_and_the_tag_depends_on_it() {
        let address = "127.0.0.1:7".parse().unwrap();
        let first = UniqueId {
            address,
            key: Key::new([0xab; 16]),
        };
        let second = UniqueId {
            address,
            key: Key::new([0xac; 16]),
        };
        let debug = format!("{first:?} {:?}", first.key()).to_lowercase();
        assert!(!debug.contains("abab") && !debug.contains("171"), "{debug}");
        assert_ne!(first.tag(), second.tag());
        assert_ne!(first.tag(), [0xab; 16]);
    }
}
