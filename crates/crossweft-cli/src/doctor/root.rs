//! Files below a directory that stands for `/`.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The directory that stands for `/`.
pub(super) struct Root<'a>(pub(super) &'a Path);

impl Root<'_> {
    /// An absolute path, below this root.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, as far as it is text. At most 4 MiB: no machine has more to say.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = self.path(path);
        // A pipe or device in the place of a file would block the read.
        fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        fs::File::open(path)
            .ok()?
            .take(4 << 20)
            .read_to_end(&mut bytes)
            .ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The one value that a file of sysfs holds.
    pub(super) fn value(&self, path: impl AsRef<Path>) -> Option<String> {
        printable(&self.text(path)?)
    }

    /// The one number that a file of sysfs holds; -1, which stands for unknown, is none.
    pub(super) fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.value(path)?.parse().ok()
    }

    /// Names in a directory, in order; empty if there is no such directory.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path(path))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| printable(&entry.file_name().to_string_lossy()))
            .collect()
    }

    pub(super) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }
}

/// The text without control characters, which a terminal would obey, and of a bearable length.
pub(super) fn printable(text: &str) -> Option<String> {
    printable_within(text, 120)
}

/// As [`printable`], of at most so many characters.
pub(super) fn printable_within(text: &str, length: usize) -> Option<String> {
    let spaced = text
        .trim()
        .replace(|c: char| c.is_control() || c == '\u{fffd}', " ");
    let text: String = spaced.trim().chars().take(length).collect();
    (!text.is_empty()).then_some(text)
}

/// The value of the first line `key: value`.
pub(super) fn field(text: &str, key: &str) -> Option<String> {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| printable(value))
    };
    text.lines().find_map(value)?
}

/// Whether a name is `stem` and a number.
pub(super) fn numbered(name: &str, stem: &str) -> bool {
    name.strip_prefix(stem)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}
