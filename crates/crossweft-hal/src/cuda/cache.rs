//! Results worth keeping between runs, as files, such as what probes found.
//!
//! An entry is written aside and renamed, so that it is there whole or not at all, and carries a
//! checksum, so that a damaged one is a miss. Its name is the hash of everything it depends on.
//! Nothing here can fail: a directory that cannot be used is a cache that never hits.
//!
//! ```text
//! 0   8 bytes   "cwcache1"
//! 8   32 bytes  SHA-256 of what follows
//! 40  to the end: the value
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

/// A directory of results, or none.
#[derive(Debug)]
pub struct Cache {
    directory: Option<PathBuf>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// What an entry depends on, hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    name: String,
}

impl Key {
    /// `kind` is for people who look at the directory. Parts are told apart by their lengths.
    pub(super) fn new(kind: &str, parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let name = hash
            .finalize()
            .iter()
            .fold(format!("{kind}-"), |name, byte| format!("{name}{byte:02x}"));
        Self { name }
    }
}

const MAGIC: &[u8; 8] = b"cwcache1";
const HEADER: usize = 40;
/// More than any module of ours; a larger file is not ours.
const LARGEST: u64 = 256 << 20;

impl Cache {
    /// The cache of this user: `$CROSSWEFT_CACHE_DIR`, else `$XDG_CACHE_HOME/crossweft`, else
    /// `~/.cache/crossweft`. An empty `CROSSWEFT_CACHE_DIR` turns it off.
    #[must_use]
    pub fn from_environment() -> Self {
        Self::decide(|name| std::env::var_os(name))
    }

    /// As [`from_environment`](Self::from_environment), by an environment that `variable` gives.
    #[must_use]
    pub fn decide(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        // A relative path would be another directory for each that a program is started in.
        let absolute = |name| {
            variable(name)
                .map(PathBuf::from)
                .filter(|p| p.is_absolute())
        };
        let directory = match variable("CROSSWEFT_CACHE_DIR") {
            Some(own) if own.is_empty() => None,
            Some(own) => std::path::absolute(own).ok(),
            None => absolute("XDG_CACHE_HOME")
                .or_else(|| Some(absolute("HOME")?.join(".cache")))
                .map(|caches| caches.join("crossweft")),
        };
        Self::new(directory)
    }

    /// A cache in `directory`, which is made when first needed.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Self::new(Some(directory.to_owned()))
    }

    /// A cache that keeps nothing.
    #[must_use]
    pub fn none() -> Self {
        Self::new(None)
    }

    fn new(directory: Option<PathBuf>) -> Self {
        Self {
            directory,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// The directory, whether or not it is there.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// How many look-ups found something, and how many did not, through this value.
    #[must_use]
    pub fn hits_and_misses(&self) -> (u64, u64) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.hits), count(&self.misses))
    }

    /// What a file of that name in the directory holds, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or others than this user could have written it.
    pub fn file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(directory) = &self.directory else {
            return Ok(None);
        };
        match read(&directory.join(name)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Has `change` make a new file of that name out of what it holds, if that can be read, writes it whole or not at all, and
    /// returns its path; none where nothing is kept. Who else does so meanwhile, in whatever process, comes before or after.
    /// Blocks for ten seconds at most.
    ///
    /// # Errors
    /// It cannot be written, or another process is at it for too long.
    pub fn update_file(
        &self,
        name: &str,
        change: impl FnOnce(Option<Vec<u8>>) -> Vec<u8>,
    ) -> io::Result<Option<PathBuf>> {
        let Some(directory) = &self.directory else {
            return Ok(None);
        };
        make(directory)?;
        // Beside the file, which is replaced; until this is dropped.
        let _lock = lock(&directory.join(format!(".{name}.lock")))?;
        let there = self.file(name).ok().flatten();
        write(directory, name, &[&change(there)])?;
        Ok(Some(directory.join(name)))
    }

    /// The value stored under `key`, if it is there and whole.
    pub(super) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let found = self.directory.as_ref().and_then(|directory| {
            let path = directory.join(&key.name);
            match read(&path).and_then(unwrap) {
                Ok(value) => Some(value),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "a cache entry is unusable");
                    None
                }
            }
        });
        let counter = if found.is_some() {
            &self.hits
        } else {
            &self.misses
        };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Stores a value under `key`, if that is possible.
    pub(super) fn store(&self, key: &Key, value: &[u8]) {
        let header: [&[u8]; 2] = [MAGIC, &Sha256::digest(value)];
        if let Some(directory) = &self.directory
            && let Err(error) = make(directory)
                .and_then(|()| write(directory, &key.name, &[header[0], header[1], value]))
        {
            tracing::debug!(directory = %directory.display(), %error, "nothing is cached");
        }
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        // Of a pipe, which is no entry, opening would wait for a writer.
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    // What is read here runs on the device, in this process's name.
    let metadata = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_file() || metadata.uid() != own || metadata.mode() & 0o022 != 0 {
        return Err(damaged("it is not a file that only this user can write"));
    }
    if metadata.len() > LARGEST {
        return Err(damaged("it is too large to be an entry"));
    }
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// How long [`Cache::update_file`] waits for who else changes the file.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// A file that nobody else has locked like this.
fn lock(path: &Path) -> io::Result<fs::File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "another process has locked {} for {LOCK_LIMIT:?}",
                        path.display()
                    ),
                ));
            }
            // Some file systems have no locks: the last who writes wins there.
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "not locked");
                return Ok(file);
            }
            Ok(()) => return Ok(file),
        }
    }
}

/// The value of an entry.
fn unwrap(mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    let (header, value) = bytes
        .split_at_checked(HEADER)
        .ok_or_else(|| damaged("it is truncated"))?;
    if &header[..8] != MAGIC || header[8..] != Sha256::digest(value)[..] {
        return Err(damaged("its checksum is wrong"));
    }
    bytes.drain(..HEADER);
    Ok(bytes)
}

fn make(directory: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

fn write(directory: &Path, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    // Containers, or hosts, with one home may have the same numbers for processes and threads: a number by chance as well, and
    // what somebody else has is not touched.
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let chance = RandomState::new().hash_one((process, thread));
    let aside = directory.join(format!(".{name}.{process}.{chance:016x}"));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&aside)?;
    let mut written = || {
        for part in parts {
            file.write_all(part)?;
        }
        fs::rename(&aside, directory.join(name))
    };
    written().inspect_err(|_| {
        // It may not be there; that is what is wanted.
        let _ = fs::remove_file(&aside);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key() -> Key {
        Key::new("t", &[b"ab", b"c"])
    }

    fn store(cache: &Cache, text: &[u8]) -> io::Result<Option<PathBuf>> {
        cache.update_file("t.json", |_| text.to_vec())
    }

    #[test]
    fn values_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(&directory.path().join("a/b"));
        assert_eq!(cache.load(&key()), None);
        cache.store(&key(), b"value");
        assert_eq!(cache.load(&key()).unwrap(), b"value");
        cache.store(&key(), b"");
        assert_eq!(cache.load(&key()).unwrap(), b"");
        assert_eq!(cache.hits_and_misses(), (2, 1));
        let file = fs::metadata(directory.path().join("a/b").join(key().name)).unwrap();
        assert_eq!((file.mode() & 0o777, file.len()), (0o600, HEADER as u64));
        assert_ne!(key(), Key::new("t", &[b"a", b"bc"]), "parts have ends");
    }

    #[test]
    fn damaged_and_foreign_entries_are_misses() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let path = directory.path().join(key().name);
        let good = || {
            cache.store(&key(), b"a value of some bytes");
            assert!(cache.load(&key()).is_some());
            fs::read(&path).unwrap()
        };
        let whole = good();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(cache.load(&key()), None, "{length}");
        }
        for index in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[index] ^= 1;
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.load(&key()), None, "{index}");
        }
        good();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(cache.load(&key()), None, "others could have written it");
        fs::remove_file(&path).unwrap();
        fs::write(directory.path().join("elsewhere"), &whole).unwrap();
        std::os::unix::fs::symlink(directory.path().join("elsewhere"), &path).unwrap();
        assert_eq!(cache.load(&key()), None, "a link");
    }

    #[test]
    fn files_are_written_whole_and_read_if_nobody_else_could_have() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(&directory.path().join("a"));
        assert_eq!(cache.file("t.json").unwrap(), None);
        let path = store(&cache, b"{}").unwrap().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"{}");
        assert_eq!(cache.file("t.json").unwrap().unwrap(), b"{}");
        let names = fs::read_dir(directory.path().join("a")).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let expected = [".t.json.lock", "t.json"];
        assert_eq!(names, expected, "nothing is left beside it but the lock");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
        assert!(cache.file("t.json").is_err());
        assert_eq!(store(&Cache::none(), b"{}").unwrap(), None);
        assert!(store(&Cache::at(&path), b"{}").is_err());
    }

    #[test]
    fn changes_of_a_file_follow_one_another() {
        let directory = tempfile::tempdir().unwrap();
        let add = |byte: u8| {
            // As another process has it: a cache, and so a lock, of its own.
            let cache = Cache::at(&directory.path().join("a"));
            let change = |there: Option<Vec<u8>>| {
                let mut all = there.unwrap_or_default();
                std::thread::sleep(Duration::from_millis(2));
                all.push(byte);
                all
            };
            cache.update_file("t.json", change).unwrap().unwrap()
        };
        std::thread::scope(|scope| {
            for byte in 0..16 {
                scope.spawn(move || add(byte));
            }
        });
        let mut all = fs::read(directory.path().join("a/t.json")).unwrap();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<u8>>());
    }

    /// Opening one waits for a writer, for ever.
    #[test]
    fn a_pipe_is_no_entry() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("t.json");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(Cache::at(directory.path()).file("t.json").is_err());
    }

    #[test]
    fn writers_do_not_share_what_they_write_aside() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        // As another process of this number has it, in a container of its own with the same home.
        let (process, thread) = (std::process::id(), std::thread::current().id());
        let theirs = directory
            .path()
            .join(format!(".t.json.{process}.{thread:?}"));
        let mut other = fs::File::create(&theirs).unwrap();
        other.write_all(b"{\"half").unwrap();
        store(&cache, b"{}").unwrap();
        other.write_all(b"\": 1}").unwrap();
        assert_eq!(cache.file("t.json").unwrap().unwrap(), b"{}");
        assert!(theirs.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_no_cache() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        for cache in [Cache::at(&file.join("below")), Cache::none()] {
            cache.store(&key(), b"value");
            assert_eq!(cache.load(&key()), None);
        }
    }

    #[test]
    fn where_it_is() {
        let decide = |set: &[(&str, &str)]| {
            let cache = Cache::decide(|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| value.into())
            });
            cache.directory().map(|path| path.display().to_string())
        };
        let home = ("HOME", "/home/a");
        let xdg = ("XDG_CACHE_HOME", "/x");
        assert_eq!(decide(&[home]).unwrap(), "/home/a/.cache/crossweft");
        assert_eq!(decide(&[home, xdg]).unwrap(), "/x/crossweft");
        let own = ("CROSSWEFT_CACHE_DIR", "/own");
        assert_eq!(decide(&[home, xdg, own]).unwrap(), "/own");
        assert_eq!(decide(&[home, ("CROSSWEFT_CACHE_DIR", "")]), None);
        assert_eq!(decide(&[("XDG_CACHE_HOME", "relative")]), None);
        assert_eq!(decide(&[]), None);
    }
}
