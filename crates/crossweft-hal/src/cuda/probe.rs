//! Whether devices really reach each other's memory: written and read, not asked.
//!
//! On some machines the driver says yes and the data is wrong or never arrives (IOMMU, ACS, virtual
//! machines). So a pattern goes over every ordered pair once, and what is found is kept for the
//! next run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Cache, Key};
use super::context::Context;
use super::error::CudaError;
use super::memory::{DeviceMemory, MemoryOptions};
use super::module::{Argument, Kernel, Shape};
use super::stream::Stream;

/// What came of one ordered pair of devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reach {
    /// Data arrived as sent, both ways.
    Works,
    /// The driver says that it does not; nothing was tried.
    Denied,
    /// It was tried and failed, although the driver says that it works.
    Broken {
        /// What happened.
        reason: String,
    },
}

/// What came of all pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMatrix {
    /// A row for each device that reads and writes, a column for each whose memory it is.
    pub pairs: Vec<Vec<Reach>>,
    /// Whether it was found by an earlier run.
    pub was_cached: bool,
}

/// Makes a kernel for a device that copies words of 4 bytes: its parameters are the target's and
/// the source's address and the number of words, each a `u64`. It is launched with 1 block of 128
/// threads.
pub type CopyKernel<'a> = &'a dyn Fn(&Arc<Context>) -> Result<Kernel, CudaError>;

/// Bytes of the pattern: several pages of a link's smallest unit.
const BYTES: usize = 64 << 10;

/// Tries every ordered pair of the devices, by copy engine and, with a `kernel`, by loads and
/// stores. Blocks: about 1 ms a pair, `limit` for each step that hangs. What is found is kept in
/// `cache` unless something is broken, and then believed until a device or the driver changes.
///
/// # Errors
/// [`CudaError`] if a device fails by itself, not for a pair that does not work.
pub fn probe_peers(
    contexts: &[Arc<Context>],
    kernel: Option<CopyKernel<'_>>,
    limit: Duration,
    cache: &Cache,
) -> Result<PeerMatrix, CudaError> {
    let key = key(contexts, kernel.is_some())?;
    if let Some(pairs) = cache
        .load(&key)
        .and_then(|text| parse(&text, contexts.len()))
    {
        return Ok(PeerMatrix {
            pairs,
            was_cached: true,
        });
    }
    let mut pairs = Vec::new();
    for (row, own) in contexts.iter().enumerate() {
        let kernel = kernel.map(|make| make(own)).transpose()?;
        let mut reached = Vec::new();
        for (column, peer) in contexts.iter().enumerate() {
            let seed = (row * contexts.len() + column) as u32;
            reached.push(probe(own, peer, kernel.as_ref(), seed, limit)?);
        }
        pairs.push(reached);
    }
    if let Some(text) = write(&pairs) {
        cache.store(&key, text.as_bytes());
    }
    Ok(PeerMatrix {
        pairs,
        was_cached: false,
    })
}

fn probe(
    own: &Arc<Context>,
    peer: &Arc<Context>,
    kernel: Option<&Kernel>,
    seed: u32,
    limit: Duration,
) -> Result<Reach, CudaError> {
    if own.ordinal() == peer.ordinal() {
        return Ok(Reach::Works);
    }
    if !own.device().peer(peer.device())?.access {
        return Ok(Reach::Denied);
    }
    let near = DeviceMemory::allocate(own, BYTES as u64, &MemoryOptions::default())?;
    let stream = Stream::new(own)?;
    let options = MemoryOptions {
        peers: std::slice::from_ref(own.device()),
        ..MemoryOptions::default()
    };
    let far = match DeviceMemory::allocate(peer, BYTES as u64, &options) {
        Ok(far) => far,
        Err(error) if error.is_context_lost() => return Err(error),
        Err(error) => {
            return Ok(Reach::Broken {
                reason: error.to_string(),
            });
        }
    };
    match exchange(&near, &far, &stream, kernel, seed, limit) {
        Ok(None) => Ok(Reach::Works),
        Ok(Some(reason)) => Ok(Reach::Broken { reason }),
        Err(error) if error.is_context_lost() => Err(error),
        Err(error) => {
            // Something may still be running, and writing there.
            std::mem::forget((near, far, kernel.cloned()));
            Ok(Reach::Broken {
                reason: error.to_string(),
            })
        }
    }
}

/// Sends a pattern there and another back, in each way. Returns what is wrong with what arrived.
fn exchange(
    near: &DeviceMemory,
    far: &DeviceMemory,
    stream: &Stream,
    kernel: Option<&Kernel>,
    seed: u32,
    limit: Duration,
) -> Result<Option<String>, CudaError> {
    let engine = |to: &DeviceMemory, from: &DeviceMemory| {
        let (to, from) = (
            (to.address(), &**to.context()),
            (from.address(), &**from.context()),
        );
        // SAFETY: both are ours, this long, and used by nobody else.
        unsafe { stream.copy_peer(to, from, BYTES as u64) }
    };
    let threads = |kernel: &Kernel, to: &DeviceMemory, from: &DeviceMemory| {
        let words = (BYTES / 4) as u64;
        let (to, from) = (to.address(), from.address());
        let arguments: [Argument<'_>; 3] = [(&to).into(), (&from).into(), (&words).into()];
        // SAFETY: the parameters are as `CopyKernel` demands; the memory as above.
        unsafe { kernel.launch(stream, &Shape::linear(1, 128), &arguments) }
    };
    let ways = [("a copy", None), ("a kernel", kernel)];
    let ways = ways
        .into_iter()
        .filter(|(what, kernel)| *what == "a copy" || kernel.is_some());
    for (way, (what, kernel)) in ways.enumerate() {
        for (step, (from, to)) in [(near, far), (far, near)].into_iter().enumerate() {
            let sent = pattern(seed, way * 2 + step);
            from.write(0, &sent)?;
            // Whatever a failed way left there must not look like success.
            to.fill(0, 0, BYTES as u64)?;
            match kernel {
                None => engine(to, from)?,
                Some(kernel) => threads(kernel, to, from)?,
            }
            stream.synchronize(Instant::now() + limit)?;
            let mut arrived = vec![0; BYTES];
            to.read(0, &mut arrived)?;
            if let Some(index) = sent.iter().zip(&arrived).position(|(a, b)| a != b) {
                let direction = if step == 0 { "to" } else { "from" };
                let (sent, arrived) = (sent[index], arrived[index]);
                return Ok(Some(format!(
                    "{what} {direction} the peer: byte {index} is {arrived:#04x}, not {sent:#04x}"
                )));
            }
        }
    }
    Ok(None)
}

/// Bytes that differ between pairs and steps, and between neighbouring words.
fn pattern(seed: u32, step: usize) -> Vec<u8> {
    let mut state = seed
        .wrapping_mul(16)
        .wrapping_add(step as u32)
        .wrapping_add(1);
    let words = (0..BYTES / 4).flat_map(|_| {
        // xorshift32; never 0, so nothing matches cleared memory for long.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()
    });
    words.collect()
}

fn key(contexts: &[Arc<Context>], kernel: bool) -> Result<Key, CudaError> {
    let mut parts = vec![vec![u8::from(kernel)]];
    for context in contexts {
        let driver = context.driver();
        parts.push(context.device().uuid()?.0.to_vec());
        parts.push(format!("{} {}", driver.version(), driver.build()).into_bytes());
    }
    let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
    Ok(Key::new("peers", &parts))
}

/// A line for each row, a letter for each pair. `None` if something is broken: that may mend.
fn write(pairs: &[Vec<Reach>]) -> Option<String> {
    let mut text = String::new();
    for row in pairs {
        for reach in row {
            text.push(match reach {
                Reach::Works => 'y',
                Reach::Denied => 'n',
                Reach::Broken { .. } => return None,
            });
        }
        text.push('\n');
    }
    Some(text)
}

fn parse(text: &[u8], count: usize) -> Option<Vec<Vec<Reach>>> {
    let row = |line: &[u8]| {
        let reach = |letter: &u8| match letter {
            b'y' => Some(Reach::Works),
            b'n' => Some(Reach::Denied),
            _ => None,
        };
        let row: Vec<_> = line.iter().map(reach).collect::<Option<_>>()?;
        (row.len() == count).then_some(row)
    };
    let lines = text.strip_suffix(b"\n")?.split(|&byte| byte == b'\n');
    let pairs: Vec<_> = lines.map(row).collect::<Option<_>>()?;
    (pairs.len() == count).then_some(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_read_as_written() {
        let pairs = vec![
            vec![Reach::Works, Reach::Denied],
            vec![Reach::Works, Reach::Works],
        ];
        let text = write(&pairs).unwrap();
        assert_eq!(parse(text.as_bytes(), 2), Some(pairs));
        for bad in ["", "\n", "yn\n", "yn\nyx\n", "yn\nyyy\n", "yn\nyy"] {
            assert_eq!(parse(bad.as_bytes(), 2), None, "{bad:?}");
        }
        let reason = String::new();
        assert_eq!(write(&[vec![Reach::Broken { reason }]]), None);
    }

    #[test]
    fn patterns_differ() {
        assert_eq!(pattern(1, 0).len(), BYTES);
        assert_ne!(pattern(1, 0), pattern(1, 1));
        assert_ne!(pattern(1, 0), pattern(2, 0));
        assert!(pattern(0, 0).chunks(4).all(|word| word != [0; 4]));
    }
}
