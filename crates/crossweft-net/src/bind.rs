//! Where to listen: loopback unless told otherwise.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::str::FromStr;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::NetError;

/// Where a socket listens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Bind {
    /// This address.
    Address(IpAddr),
    /// The first address of this network interface, IPv4 before IPv6.
    Interface(String),
    /// 127.0.0.1: ranks of this host only.
    #[default]
    Loopback,
}

impl Bind {
    /// The address to bind to.
    pub(crate) fn resolve(&self) -> Result<IpAddr, NetError> {
        match self {
            Self::Address(ip) => Ok(*ip),
            Self::Interface(name) => interface_address(name),
            Self::Loopback => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        }
    }

    /// A listener there (0 = any port), close-on-exec and non-blocking.
    pub(crate) fn listen(&self, port: u16) -> Result<(TcpListener, SocketAddr), NetError> {
        listen(SocketAddr::new(self.resolve()?, port))
    }
}

/// `lo` or `loopback`, an IP address, or the name of an interface.
impl FromStr for Bind {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let invalid = |reason: &str| NetError::InvalidBind {
            bind: text.to_owned(),
            reason: reason.to_owned(),
        };
        match text {
            "lo" | "loopback" => return Ok(Self::Loopback),
            "" => return Err(invalid("it is empty")),
            _ => {}
        }
        if let Ok(ip) = text.parse() {
            return Ok(Self::Address(ip));
        }
        // The kernel's own rule (dev_valid_name).
        if text.len() > 15 || text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
            return Err(invalid(
                "it is neither an IP address nor a possible interface name",
            ));
        }
        Ok(Self::Interface(text.to_owned()))
    }
}

pub(crate) fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), NetError> {
    let what = || format!("listening on {address}");
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)
        .map_err(|error| NetError::io(what(), error))?;
    // A job that restarts on a fixed port must not wait for the old one's TIME_WAIT.
    let listening = socket
        .set_reuse_address(true)
        .and_then(|()| socket.bind(&address.into()))
        .and_then(|()| socket.listen(4096))
        .and_then(|()| socket.set_nonblocking(true));
    listening.map_err(|error| NetError::io(what(), error))?;
    let listener = TcpListener::from(socket);
    let address = listener
        .local_addr()
        .map_err(|error| NetError::io(what(), error))?;
    Ok((listener, address))
}

/// Asks the kernel (rtnetlink) for the addresses of an interface: `getifaddrs` without libc.
fn interface_address(name: &str) -> Result<IpAddr, NetError> {
    let invalid = |reason: String| NetError::InvalidBind {
        bind: name.to_owned(),
        reason,
    };
    let failed = |error: rustix::io::Errno| {
        NetError::io(
            format!("asking for the addresses of interface {name}"),
            error,
        )
    };
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // protocol 0 is NETLINK_ROUTE
    )
    .map_err(failed)?;
    let udp = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(|error| NetError::io("creating a socket", error))?;
    let index = rustix::net::netdevice::name_to_index(&udp, name)
        .map_err(|_| invalid("there is no interface of this name; `ip link` lists them".into()))?;

    rustix::net::send(&socket, &netlink::dump_addresses(), SendFlags::empty()).map_err(failed)?;
    let mut addresses = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        let (_, length) =
            rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()).map_err(failed)?;
        let datagram = &buffer[..length.min(buffer.len())];
        if datagram.is_empty() || netlink::parse(datagram, index, &mut addresses) {
            break;
        }
    }
    addresses.sort_by_key(|ip| (ip.is_ipv6(), is_link_local(ip)));
    match addresses.first() {
        Some(ip) if !is_link_local(ip) => Ok(*ip),
        _ => Err(invalid(
            "the interface has no address that other hosts can reach".into(),
        )),
    }
}

/// IPv6 link-local addresses need a scope id, which a unique id does not carry.
fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The few bytes of rtnetlink that are needed here (`man 7 rtnetlink`), in native byte order.
mod netlink {
    use super::{IpAddr, Ipv4Addr, Ipv6Addr};

    const RTM_NEWADDR: u16 = 20;
    const RTM_GETADDR: u16 = 22;
    const REQUEST_DUMP: u16 = 0x1 | 0x300;
    const DONE: u16 = 3;
    const ERROR: u16 = 2;
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;

    pub(super) fn dump_addresses() -> Vec<u8> {
        let mut message = Vec::with_capacity(24);
        message.extend_from_slice(&24u32.to_ne_bytes()); // nlmsghdr: length, type, flags, seq, pid
        message.extend_from_slice(&RTM_GETADDR.to_ne_bytes());
        message.extend_from_slice(&REQUEST_DUMP.to_ne_bytes());
        message.extend_from_slice(&[0; 8]);
        message.extend_from_slice(&[0; 8]); // ifaddrmsg: all families, all interfaces
        message
    }

    /// Adds the addresses of interface `index`; `true` at the end of the dump.
    pub(super) fn parse(mut datagram: &[u8], index: u32, addresses: &mut Vec<IpAddr>) -> bool {
        while let (Some(length), Some(kind)) = (u32_at(datagram, 0), u16_at(datagram, 4)) {
            let length = length as usize;
            if matches!(kind, DONE | ERROR) {
                return true;
            }
            let Some(message) = datagram.get(16..length) else {
                return true;
            };
            if kind == RTM_NEWADDR && u32_at(message, 4) == Some(index) {
                addresses.extend(address(message.get(8..).unwrap_or_default()));
            }
            datagram = datagram
                .get(length.next_multiple_of(4)..)
                .unwrap_or_default();
        }
        false
    }

    fn address(mut attributes: &[u8]) -> Option<IpAddr> {
        let mut found = None;
        while let (Some(length), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
            let length = usize::from(length);
            let Some(value) = attributes.get(4..length) else {
                break;
            };
            let ip = <[u8; 4]>::try_from(value)
                .map(|octets| IpAddr::V4(Ipv4Addr::from(octets)))
                .or_else(|_| {
                    <[u8; 16]>::try_from(value).map(|octets| IpAddr::V6(Ipv6Addr::from(octets)))
                });
            match (kind, ip) {
                // On a point-to-point link IFA_ADDRESS is the other end, and IFA_LOCAL is ours.
                (IFA_LOCAL, Ok(ip)) => return Some(ip),
                (IFA_ADDRESS, Ok(ip)) => found = Some(ip),
                _ => {}
            }
            attributes = attributes
                .get(length.next_multiple_of(4)..)
                .unwrap_or_default();
        }
        found
    }

    fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
        Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
    }

    fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_forms() {
        assert_eq!("lo".parse::<Bind>().unwrap(), Bind::Loopback);
        assert_eq!("loopback".parse::<Bind>().unwrap(), Bind::Loopback);
        assert_eq!(
            "eth0".parse::<Bind>().unwrap(),
            Bind::Interface("eth0".into())
        );
        assert_eq!(
            "::1".parse::<Bind>().unwrap(),
            Bind::Address("::1".parse().unwrap())
        );
        assert!("".parse::<Bind>().is_err());
        assert!("no such thing".parse::<Bind>().is_err());
    }

    #[test]
    fn interfaces_resolve() {
        let lo = Bind::Interface("lo".into()).resolve().unwrap();
        assert!(lo.is_loopback());
        let error = Bind::Interface("nope0".into())
            .resolve()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("nope0") && error.contains("ip link"),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn netlink_noise_is_harmless(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut addresses = Vec::new();
            netlink::parse(&noise, 1, &mut addresses);
        }
    }
}
