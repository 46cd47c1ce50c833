//! What goes over a TCP connection from a proxy to a peer.
//!
//! Every frame is 24 bytes, little-endian; the bytes of a put follow it. All flow from the proxy to
//! the peer, but for the answer to a flush. Memories are named by the receiver's own keys and
//! positions by offsets: no address crosses the wire.
//!
//! ```text
//! byte 0   kind    u32   1 put, 2 signal, 3 flush, 4 ack, 5 goodbye
//! byte 4   length  u32   put: bytes that follow, at most MAX_PUT; otherwise 0
//! byte 8   name    u64   put, signal: key of the memory; flush, ack: sequence number; otherwise 0
//! byte 16  offset  u64   put, signal: where in the memory; otherwise 0
//! ```

/// Bytes of a frame.
pub(crate) const FRAME: usize = 24;
/// The most bytes that follow a put; longer ones are cut.
pub(crate) const MAX_PUT: usize = 256 * 1024;

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// `length` bytes follow, for byte `offset` of memory `key`.
    Put { key: u64, offset: u64, length: u32 },
    /// Add one to the word at byte `offset` of memory `key`.
    Signal { key: u64, offset: u64 },
    /// Answer when everything before has arrived.
    Flush { sequence: u64 },
    /// The answer.
    Ack { sequence: u64 },
    /// Nothing more will come.
    Goodbye,
}

impl Frame {
    pub(crate) fn encode(self) -> [u8; FRAME] {
        let (kind, length, name, offset) = match self {
            Self::Put {
                key,
                offset,
                length,
            } => (1u32, length, key, offset),
            Self::Signal { key, offset } => (2, 0, key, offset),
            Self::Flush { sequence } => (3, 0, sequence, 0),
            Self::Ack { sequence } => (4, 0, sequence, 0),
            Self::Goodbye => (5, 0, 0, 0),
        };
        let mut bytes = [0; FRAME];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..16].copy_from_slice(&name.to_le_bytes());
        bytes[16..].copy_from_slice(&offset.to_le_bytes());
        bytes
    }

    /// The frame, or what is wrong with the bytes.
    pub(crate) fn decode(bytes: &[u8; FRAME]) -> Result<Self, String> {
        let [k0, k1, k2, k3, l0, l1, l2, l3, rest @ ..] = *bytes;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let [a0, a1, a2, a3, a4, a5, a6, a7, offset @ ..] = rest;
        let name = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let offset = u64::from_le_bytes(offset);
        let frame = match kind {
            1 if length as usize <= MAX_PUT => Self::Put {
                key: name,
                offset,
                length,
            },
            1 => return Err(format!("a put of {length} bytes (limit {MAX_PUT})")),
            2 => Self::Signal { key: name, offset },
            3 => Self::Flush { sequence: name },
            4 => Self::Ack { sequence: name },
            5 => Self::Goodbye,
            _ => return Err(format!("a frame of unknown kind {kind}")),
        };
        // One frame, one spelling.
        if frame.encode() != *bytes {
            return Err(format!("a frame of kind {kind} with stray bits"));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire_and_nothing_else_does() {
        let all = [
            Frame::Put {
                key: u64::MAX,
                offset: 1 << 40,
                length: MAX_PUT as u32,
            },
            Frame::Signal { key: 7, offset: 64 },
            Frame::Flush { sequence: 9 },
            Frame::Ack { sequence: 9 },
            Frame::Goodbye,
        ];
        for frame in all {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
        let long = Frame::Put {
            key: 0,
            offset: 0,
            length: MAX_PUT as u32 + 1,
        };
        assert!(Frame::decode(&long.encode()).is_err());
        for byte in 0..FRAME {
            let mut bytes = Frame::Goodbye.encode();
            bytes[byte] ^= 0x80;
            assert!(Frame::decode(&bytes).is_err(), "byte {byte}");
        }
    }
}
