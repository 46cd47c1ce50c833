//! How messages become bytes.
//!
//! A message is a kind and a body; on the wire it is one or more frames of at most [`FRAGMENT`] bytes
//! of body each, so that an acknowledgement never waits behind megabytes.
//!
//! | bytes | what                                                  |
//! |-------|-------------------------------------------------------|
//! | 0..4  | `CWFT`                                                |
//! | 4..6  | version, little-endian: 2                             |
//! | 6     | kind of the message                                   |
//! | 7     | 1 if more frames of this message follow, otherwise 0  |
//! | 8..12 | length of the body in this frame, little-endian       |
//! | 12..  | body                                                  |

/// The most body bytes in one frame.
pub(crate) const FRAGMENT: usize = 16 << 10;
/// The version in every frame and in `Hello`.
pub(crate) const VERSION: u16 = 2;

/// The version of the crate, in `Hello`.
pub(crate) const BUILD: &str = env!("CARGO_PKG_VERSION");

const MAGIC: &[u8; 4] = b"CWFT";
const HEADER: usize = 12;

/// What a message is; the bodies are in `message`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello = 1,
    Waiting = 2,
    Table = 3,
    Refuse = 4,
    Missing = 5,
    Ready = 6,
    Broken = 7,
    Acknowledge = 8,
    Abort = 9,
    Round = 16,
    Control = 17,
}

impl Kind {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        let all = [
            Self::Hello,
            Self::Waiting,
            Self::Table,
            Self::Refuse,
            Self::Missing,
            Self::Ready,
            Self::Broken,
            Self::Acknowledge,
            Self::Abort,
            Self::Round,
            Self::Control,
        ];
        all.into_iter().find(|&kind| kind as u8 == byte)
    }
}

/// The frames of a message, each ready to be sent.
pub(crate) fn encode(kind: Kind, body: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let count = body.len().div_ceil(FRAGMENT).max(1);
    (0..count).map(move |index| {
        let start = index * FRAGMENT;
        let part = &body[start..body.len().min(start + FRAGMENT)];
        let mut frame = Vec::with_capacity(HEADER + part.len());
        frame.extend_from_slice(MAGIC);
        frame.extend_from_slice(&VERSION.to_le_bytes());
        frame.push(kind as u8);
        frame.push(u8::from(index + 1 < count));
        let length = u32::try_from(part.len()).unwrap_or(u32::MAX); // at most FRAGMENT
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(part);
        frame
    })
}

/// Puts messages together again. Memory grows only with bytes that really came, up to a limit.
#[derive(Debug)]
pub(crate) struct Decoder {
    input: Vec<u8>,
    start: usize,
    partial: Option<(Kind, Vec<u8>)>,
    limit: usize,
    consumed: u64,
}

/// Why a stream is not what it should be; nothing after it can be trusted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a frame does not start with the magic bytes")]
    Magic,
    #[error("a frame has version {0}, but this is version {VERSION}")]
    Version(u16),
    #[error("a frame of kind {0} is unknown")]
    Kind(u8),
    #[error("a frame has invalid flags")]
    Flags,
    #[error("a message is longer than {0} bytes")]
    Length(usize),
}

impl Decoder {
    /// `limit` bounds the body of a whole message.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            input: Vec::new(),
            start: 0,
            partial: None,
            limit,
            consumed: 0,
        }
    }

    /// More bytes from the stream.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        if self.start > 0 && self.start >= self.input.len() / 2 {
            self.input.drain(..self.start);
            self.start = 0;
        }
        self.input.extend_from_slice(bytes);
    }

    /// The next whole message, if its bytes have come.
    pub(crate) fn next_message(&mut self) -> Result<Option<(Kind, Vec<u8>)>, FrameError> {
        loop {
            let input = &self.input[self.start..];
            let Some((header, rest)) = input.split_first_chunk::<HEADER>() else {
                return Ok(None);
            };
            if &header[..4] != MAGIC {
                return Err(FrameError::Magic);
            }
            let version = u16::from_le_bytes([header[4], header[5]]);
            if version != VERSION {
                return Err(FrameError::Version(version));
            }
            let kind = Kind::from_byte(header[6]).ok_or(FrameError::Kind(header[6]))?;
            let more = match header[7] {
                0 => false,
                1 => true,
                _ => return Err(FrameError::Flags),
            };
            let length =
                u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
            let before = self.partial.as_ref().map_or(0, |(_, body)| body.len());
            if length > FRAGMENT || before + length > self.limit {
                return Err(FrameError::Length(self.limit.min(FRAGMENT.max(before))));
            }
            let Some(part) = rest.get(..length) else {
                return Ok(None);
            };

            let mut body = match self.partial.take() {
                // Frames of other messages come between messages, never inside; acknowledgements may.
                Some((open, body)) if kind == Kind::Acknowledge && open != kind => {
                    self.partial = Some((open, body));
                    Vec::new()
                }
                Some((open, _)) if open != kind => return Err(FrameError::Flags),
                Some((_, body)) => body,
                None => Vec::new(),
            };
            body.extend_from_slice(part);
            self.start += HEADER + length;
            if kind == Kind::Acknowledge {
                if more {
                    return Err(FrameError::Flags);
                }
                return Ok(Some((kind, body)));
            }
            self.consumed += (HEADER + length) as u64;
            if !more {
                return Ok(Some((kind, body)));
            }
            self.partial = Some((kind, body));
        }
    }

    /// Bytes of frames taken so far, other than acknowledgements.
    pub(crate) fn consumed(&self) -> u64 {
        self.consumed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(decoder: &mut Decoder) -> Result<Vec<(Kind, Vec<u8>)>, FrameError> {
        let mut messages = Vec::new();
        while let Some(message) = decoder.next_message()? {
            messages.push(message);
        }
        Ok(messages)
    }

    proptest! {
        #[test]
        fn messages_survive_any_split(
            lengths in proptest::collection::vec(0usize..50_000, 1..4),
            chunk in 1usize..20_000,
        ) {
            let bodies: Vec<Vec<u8>> = lengths
                .iter()
                .map(|&length| (0..length).map(|i| (i * 7 + length) as u8).collect())
                .collect();
            let wire: Vec<u8> =
                bodies.iter().flat_map(|body| encode(Kind::Round, body)).flatten().collect();
            let mut decoder = Decoder::new(50_000);
            let mut messages = Vec::new();
            for bytes in wire.chunks(chunk) {
                decoder.feed(bytes);
                messages.extend(decode_all(&mut decoder).unwrap());
            }
            prop_assert_eq!(messages.len(), bodies.len());
            for ((kind, got), body) in messages.iter().zip(&bodies) {
                prop_assert_eq!(*kind, Kind::Round);
                prop_assert_eq!(got, body);
            }
            prop_assert_eq!(decoder.consumed(), wire.len() as u64);
        }

        #[test]
        fn noise_never_panics_and_memory_is_bounded(
            noise in proptest::collection::vec(any::<u8>(), 0..400),
            valid_start in any::<bool>(),
        ) {
            let mut decoder = Decoder::new(1000);
            if valid_start {
                decoder.feed(b"CWFT\x01\x00");
            }
            decoder.feed(&noise);
            while let Ok(Some((_, body))) = decoder.next_message() {
                prop_assert!(body.len() <= 1000);
            }
        }
    }

    #[test]
    fn too_long_is_refused_before_the_body_comes() {
        let frame = encode(Kind::Hello, &[0; 2000]).next().unwrap();
        let mut decoder = Decoder::new(1999);
        decoder.feed(&frame[..HEADER]);
        assert!(matches!(decoder.next_message(), Err(FrameError::Length(_))));

        // Also when it is only the sum of the fragments that is too long.
        let mut decoder = Decoder::new(FRAGMENT + 10);
        for frame in encode(Kind::Hello, &[0; FRAGMENT + 11]) {
            decoder.feed(&frame);
        }
        assert!(matches!(decoder.next_message(), Err(FrameError::Length(_))));
    }

    #[test]
    fn an_acknowledgement_may_come_inside_a_message() {
        let body = vec![3; FRAGMENT + 1];
        let frames: Vec<_> = encode(Kind::Round, &body).collect();
        let mut decoder = Decoder::new(1 << 20);
        decoder.feed(&frames[0]);
        decoder.feed(&encode(Kind::Acknowledge, &[1]).next().unwrap());
        decoder.feed(&frames[1]);
        assert_eq!(
            decoder.next_message(),
            Ok(Some((Kind::Acknowledge, vec![1])))
        );
        assert_eq!(decoder.next_message(), Ok(Some((Kind::Round, body))));
    }
}
