//! Small numbers for things, reused once they are free again.

use crossweft_device::fifo::MAX_ID;

use crate::ChannelError;

/// What a number stands for, by number.
#[derive(Debug)]
pub(crate) struct Ids<T> {
    kind: &'static str,
    limit: u32,
    slots: Vec<Option<T>>,
    /// Numbers below `slots.len()` that are free; the last one freed is used next.
    free: Vec<u32>,
}

impl<T> Ids<T> {
    /// `kind` is the word for what is numbered.
    pub(crate) fn new(kind: &'static str) -> Self {
        Self::with_limit(kind, MAX_ID)
    }

    fn with_limit(kind: &'static str, limit: u32) -> Self {
        Self {
            kind,
            limit,
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) -> Result<u32, ChannelError> {
        if let Some(id) = self.free.pop() {
            self.slots[id as usize] = Some(value);
            return Ok(id);
        }
        match u32::try_from(self.slots.len()) {
            Ok(id) if id < self.limit => {
                self.slots.push(Some(value));
                Ok(id)
            }
            _ => Err(ChannelError::TooMany {
                kind: self.kind,
                limit: self.limit,
            }),
        }
    }

    pub(crate) fn get(&self, id: u32) -> Result<&T, ChannelError> {
        let slot = self.slots.get(id as usize);
        slot.and_then(Option::as_ref).ok_or(self.unknown(id))
    }

    pub(crate) fn remove(&mut self, id: u32) -> Result<T, ChannelError> {
        let slot = self.slots.get_mut(id as usize);
        match slot.and_then(Option::take) {
            Some(value) => {
                self.free.push(id);
                Ok(value)
            }
            None => Err(self.unknown(id)),
        }
    }

    fn unknown(&self, id: u32) -> ChannelError {
        ChannelError::UnknownId {
            kind: self.kind,
            id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_and_limited() {
        let mut ids = Ids::with_limit("memory", 3);
        let all: Vec<_> = (0..3).map(|n| ids.insert(n * 10).unwrap()).collect();
        assert_eq!(all, [0, 1, 2]);
        let error = ids.insert(7).unwrap_err().to_string();
        assert!(error.contains("3 memory ids"), "{error}");
        assert_eq!(ids.remove(1).unwrap(), 10);
        let error = ids.remove(1).unwrap_err().to_string();
        assert!(error.contains("memory id 1"), "{error}");
        assert!(ids.get(1).is_err() && ids.get(99).is_err());
        assert_eq!(ids.insert(8).unwrap(), 1);
        assert_eq!(*ids.get(1).unwrap(), 8);
    }
}
