//! What is tried again and again, such as to accept, complains of a failure only now and then.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// How long it says nothing more.
const AGAIN: Duration = Duration::from_secs(10);

/// When it was said last.
#[derive(Debug, Default)]
pub(crate) struct Complaint(Option<Instant>);

impl Complaint {
    /// What to say of an error now, if it is time for that.
    pub(crate) fn of(&mut self, error: &io::Error, now: Instant) -> Option<String> {
        self.is_due(now).then(|| words(error))
    }

    /// Whether it is time to say something, which is then said.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_old = |last: Instant| now.saturating_duration_since(last) >= AGAIN;
        let is_due = self.0.is_none_or(is_old);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

/// The error, and what to do about it if it is a limit.
pub(crate) fn words(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            let limit = getrlimit(Resource::Nofile).current;
            let limit = limit.map_or("all that there are".to_owned(), |n| n.to_string());
            format!(
                "{error}: this process has as many open files as it may, {limit}; raise that with `ulimit -n`"
            )
        }
        Some(Errno::NFILE) => {
            format!("{error}: the host has as many as it may, which is in /proc/sys/fs/file-max")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_named_once_and_again_after_a_while() {
        let (mut complaint, now) = (Complaint::default(), Instant::now());
        let full = io::Error::from(Errno::MFILE);
        let said: Vec<_> = (0..1000)
            .map(|turn| now + Duration::from_millis(20) * turn)
            .filter_map(|at| complaint.of(&full, at))
            .collect();
        assert_eq!(said.len(), 2);
        let limit = getrlimit(Resource::Nofile).current.unwrap().to_string();
        for words in ["`ulimit -n`", &limit] {
            assert!(said[0].contains(words), "{}", said[0]);
        }
        let gone = io::Error::from(Errno::CONNABORTED);
        let later = now + Duration::from_secs(60);
        assert_eq!(complaint.of(&gone, later), Some(gone.to_string()));
    }
}
