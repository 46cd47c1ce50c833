//! Passing the unique id from rank 0 to the others where no launcher does: by a file that only the
//! user can read, or on one host by an abstract Unix socket that only the user's processes can use.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use sha2::{Digest, Sha256};

use crate::auth;
use crate::cancel::Cancel;
use crate::complaint::Complaint;
use crate::error::NetError;
use crate::fds::{FetchError, connect, is_own_user, listen};
use crate::group::Group;
use crate::poll::{self, Waker};
use crate::unique_id::UniqueId;

/// How often to look again.
const RETRY: Duration = Duration::from_millis(20);
/// How long one client may keep the server of ids waiting.
const PATIENCE: Duration = Duration::from_millis(500);

/// Until somebody listens there, or the deadline, after which joining says what is wrong.
pub(crate) fn wait_for_listener(
    address: SocketAddr,
    rank: u32,
    cancel: Option<&Cancel>,
    deadline: Instant,
) -> Result<(), NetError> {
    loop {
        Cancel::check(cancel, rank)?;
        let left = deadline.saturating_duration_since(Instant::now());
        // Not for longer, so that cancelling is noticed where nobody answers at all.
        let attempt = left.min(PATIENCE);
        if attempt.is_zero() || TcpStream::connect_timeout(&address, attempt).is_ok() {
            return Ok(());
        }
        std::thread::sleep(RETRY.min(left));
    }
}

/// A file with the id, for as long as this value lives.
#[derive(Debug)]
pub(crate) struct IdFile<'a>(&'a Path);

impl<'a> IdFile<'a> {
    /// Appears whole or not at all: written beside the path, then renamed.
    pub(crate) fn create(path: &'a Path, id: &UniqueId) -> Result<Self, NetError> {
        let suffix = u64::from_le_bytes(auth::random()?);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{suffix:016x}"));
        let temporary = path.with_file_name(name);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| writeln!(file, "{id}"))
            .and_then(|()| std::fs::rename(&temporary, path));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&temporary);
            let reason = format!("rank 0 could not create it ({error}); is the folder writable?");
            return Err(NetError::IdFile {
                path: path.to_owned(),
                reason,
            });
        }
        Ok(Self(path))
    }
}

impl Drop for IdFile<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.0) {
            tracing::warn!(path = %self.0.display(), %error, "could not remove the id file");
        }
    }
}

/// How long the rendezvous that a file leads to may take to prove the secret; until then nobody looks
/// for a new file.
const PROOF: Duration = Duration::from_secs(3);
/// When an id that led nowhere is tried again: rank 0 may only have been stopped for a while.
const AGAIN: Duration = Duration::from_secs(5);

/// Waits for the file and joins with the id in it. A file left over from an earlier job leads
/// nowhere; then this waits for a new one.
pub(crate) fn from_file(
    path: &Path,
    rank: u32,
    cancel: Option<&Cancel>,
    deadline: Instant,
    join_if_proven: impl Fn(&UniqueId, Duration) -> Result<Group, NetError>,
) -> Result<Group, NetError> {
    let mut stale: Option<(UniqueId, Instant)> = None;
    let mut last_error = None;
    loop {
        Cancel::check(cancel, rank)?;
        let is_stale = |id: &UniqueId| {
            let known = stale.as_ref().filter(|(known, _)| known == id);
            known.is_some_and(|(_, again)| Instant::now() < *again)
        };
        match read_file(path)? {
            Some(id) if !is_stale(&id) => match join_if_proven(&id, PROOF) {
                // What a rendezvous that is over, or another server at its address, leads to.
                Err(error @ (NetError::RootLost { .. } | NetError::WrongSecret { .. })) => {
                    tracing::debug!(%error, "the id file is stale, waiting for a new one");
                    stale = Some((id, Instant::now() + AGAIN));
                    last_error = Some(error);
                }
                result => return result,
            },
            _ => {}
        }
        if Instant::now() >= deadline {
            let what = last_error.map_or("it did not appear in time".to_owned(), |error| {
                format!("the id in it led nowhere ({error}), and no other came in time")
            });
            let path = path.to_owned();
            let reason =
                format!("{what}; does rank 0 run, with the same path on a shared file system?");
            return Err(NetError::IdFile { path, reason });
        }
        std::thread::sleep(RETRY);
    }
}

/// `None` if there is no such file yet.
fn read_file(path: &Path) -> Result<Option<UniqueId>, NetError> {
    let refuse = |reason: String| NetError::IdFile {
        path: path.to_owned(),
        reason,
    };
    // Neither a link to elsewhere nor a pipe that never ends.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refuse(format!("it cannot be opened ({error})"))),
    };
    // Of the open file, so that nobody can swap it in between.
    let metadata = file.metadata().map_err(|error| refuse(error.to_string()))?;
    if !metadata.is_file() {
        return Err(refuse("it is not a regular file; remove it".to_owned()));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(refuse(format!(
            "it belongs to user {}; remove it",
            metadata.uid()
        )));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(refuse(format!(
            "others may read or write it (mode {mode:03o}), so its secret is none; remove it and let rank 0 create it"
        )));
    }
    let mut text = String::new();
    let read = file.take(1024).read_to_string(&mut text);
    read.map_err(|error| refuse(format!("it cannot be read ({error})")))?;
    text.parse()
        .map(Some)
        .map_err(|error: NetError| refuse(error.to_string()))
}

/// The abstract name under which rank 0 of a job hands out the id: of this user and this job.
pub(crate) fn socket_name(job: &str) -> String {
    let user = rustix::process::geteuid().as_raw();
    let hash = Sha256::digest(job.as_bytes());
    let hash: String = hash
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("crossweft-id-{user}-{hash}")
}

/// Hands the id to each other rank once, until dropped. Only once, so that ranks which go on to form
/// the next group wait for its id instead of getting this one again.
#[derive(Debug)]
pub(crate) struct IdServer {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl IdServer {
    pub(crate) fn start(
        name: &str,
        id: &UniqueId,
        world_size: u32,
        cancel: Option<&Cancel>,
        deadline: Instant,
    ) -> Result<Self, NetError> {
        let listener = loop {
            Cancel::check(cancel, 0)?;
            match listen(name) {
                // An earlier group of this job may be about to finish.
                Err(NetError::Io { source, .. })
                    if source.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
                {
                    std::thread::sleep(RETRY);
                }
                result => break result?,
            }
        };
        let stop = Arc::new(AtomicBool::new(false));
        let waker = Arc::new(Waker::new()?);
        let (id, stop_too, waker_too) = (id.clone(), stop.clone(), waker.clone());
        let thread = std::thread::Builder::new()
            .name("crossweft-id".to_owned())
            .spawn(move || serve(&listener, &id, world_size, &stop_too, &waker_too))
            .map_err(|error| NetError::io("starting the thread that hands out the id", error))?;
        Ok(Self {
            stop,
            waker,
            thread: Some(thread),
        })
    }
}

impl Drop for IdServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the thread that hands out the id panicked");
        }
    }
}

fn serve(
    listener: &UnixListener,
    id: &UniqueId,
    world_size: u32,
    stop: &AtomicBool,
    waker: &Waker,
) {
    let mut served = BTreeSet::new();
    let (mut complaint, mut foreign) = (Complaint::default(), Complaint::default());
    while !stop.load(Ordering::Relaxed) {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(waker, PollFlags::IN),
        ];
        if poll::until(&mut fds, Instant::now() + Duration::from_secs(60)).is_err() {
            return;
        }
        let mut client = match listener.accept() {
            Ok((client, _)) => client,
            Err(error) => {
                if !matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) {
                    if let Some(words) = complaint.of(&error, Instant::now()) {
                        tracing::warn!("could not accept whoever asks for the unique id: {words}");
                    }
                    // Out of descriptors: do not spin until some are free again.
                    std::thread::sleep(RETRY);
                }
                continue;
            }
        };
        if !is_own_user(client.as_fd()) {
            if foreign.is_due(Instant::now()) {
                tracing::warn!("another user asked for the unique id and was turned away");
            }
            continue;
        }
        // Only the user's own processes get here, so one at a time is fair enough.
        if let Ok(rank) = read_rank(&mut client)
            && rank < world_size
            && served.insert(rank)
            && let Err(error) = client.write_all(&id.to_bytes())
        {
            tracing::warn!(rank, %error, "could not hand out the unique id");
        }
    }
}

fn read_rank(client: &mut UnixStream) -> io::Result<u32> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut rank = [0; 4];
    client.read_exact(&mut rank)?;
    Ok(u32::from_le_bytes(rank))
}

/// Asks rank 0 for the id until the deadline.
pub(crate) fn from_socket(
    name: &str,
    rank: u32,
    cancel: Option<&Cancel>,
    deadline: Instant,
) -> Result<UniqueId, NetError> {
    let mut foreign = Complaint::default();
    loop {
        Cancel::check(cancel, rank)?;
        match connect(name, deadline) {
            Ok(mut stream) if is_own_user(stream.as_fd()) => {
                if let Ok(bytes) = ask(&mut stream, rank, cancel, deadline) {
                    return UniqueId::from_bytes(&bytes);
                }
            }
            Ok(_) if foreign.is_due(Instant::now()) => {
                tracing::warn!(name, "another user has taken the socket of this job");
            }
            Ok(_) => {}
            Err(FetchError::Net(error)) => return Err(error),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            let what = "getting the unique id from rank 0 of this host";
            return Err(NetError::timeout(what, vec![0]));
        }
        std::thread::sleep(RETRY);
    }
}

fn ask(
    stream: &mut UnixStream,
    rank: u32,
    cancel: Option<&Cancel>,
    deadline: Instant,
) -> io::Result<[u8; 128]> {
    stream.write_all(&rank.to_le_bytes())?;
    loop {
        let mut fds = vec![PollFd::new(&*stream, PollFlags::IN)];
        fds.extend(cancel.map(|cancel| PollFd::new(cancel, PollFlags::IN)));
        poll::until(&mut fds, deadline)?;
        if !fds[0].revents().is_empty() {
            break;
        }
        // Rank 0 answers each rank once, so giving up early would be for good.
        if Instant::now() >= deadline || cancel.is_some_and(|cancel| cancel.reason().is_some()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    // It writes all at once.
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut bytes = [0; 128];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_file_is_private_whole_and_gone_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let id = UniqueId::generate("127.0.0.1:9".parse().unwrap()).unwrap();
        assert!(read_file(&path).unwrap().is_none());
        let file = IdFile::create(&path, &id).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_file(&path).unwrap(), Some(id));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_not_private_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let id = UniqueId::generate("127.0.0.1:9".parse().unwrap()).unwrap();
        let _file = IdFile::create(&path, &id).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o777] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let error = read_file(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("{mode:03o}")), "{error}");
        }
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(read_file(&link).is_err());
        assert!(read_file(folder.path()).is_err());
    }

    #[test]
    fn a_file_that_holds_something_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        std::fs::write(&path, "hello").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(read_file(&path).unwrap_err().to_string().contains("256"));
    }
}
