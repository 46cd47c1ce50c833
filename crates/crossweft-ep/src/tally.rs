//! How much will come, before tokens do: of high throughput, callers make room for exactly that.

use crate::status::{Error, Status};

/// What a rank will receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tokens for any of its experts.
    pub(crate) tokens: u32,
    /// Tokens for each of its experts.
    pub(crate) per_expert: Vec<u32>,
}

/// What a rank tells all others: its tokens for each rank, then for each expert. A token counts once.
pub(crate) fn payload(chosen: &[i32], top_k: usize, (ranks, experts): (u32, u32)) -> Vec<u8> {
    let (ranks, experts) = (ranks as usize, experts as usize);
    let each = experts / ranks;
    let mut counts = vec![0_u32; ranks + experts];
    for token in chosen.chunks(top_k.max(1)) {
        let choices = token.iter().filter_map(|&e| usize::try_from(e).ok());
        let mut places: Vec<usize> = choices.flat_map(|e| [e / each, ranks + e]).collect();
        places.sort_unstable();
        places.dedup();
        for place in places {
            counts[place] += 1;
        }
    }
    counts
        .iter()
        .flat_map(|count| count.to_le_bytes())
        .collect()
}

/// A number of rows, which kernels and `ncclInt32` counters can hold.
fn countable(rows: u64) -> Result<u32, Error> {
    let found = u32::try_from(rows)
        .ok()
        .filter(|&rows| i32::try_from(rows).is_ok());
    found.ok_or_else(|| {
        Error::argument(format!(
            "{rows} rows would come to this rank; there can be {} at most: use fewer tokens, or a smaller \
             dispatch_output_per_expert_alignment",
            i32::MAX
        ))
    })
}

impl Tally {
    /// Of what all ranks told `rank`.
    pub(crate) fn new(
        payloads: &[Vec<u8>],
        rank: u32,
        (ranks, experts): (u32, u32),
    ) -> Result<Self, Error> {
        let (ranks, experts) = (ranks as usize, experts as usize);
        let (rank, each) = (rank as usize, experts / ranks);
        let mut tally = Self {
            tokens: 0,
            per_expert: vec![0; each],
        };
        for (source, payload) in payloads.iter().enumerate() {
            if payload.len() != 4 * (ranks + experts) {
                return Err(Error::new(
                    Status::Remote,
                    format!("rank {source} could not say where its tokens go; see its own error"),
                ));
            }
            let at = |place: usize| {
                let bytes = &payload[4 * place..4 * place + 4];
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            };
            // An expert has no more tokens than the rank.
            tally.tokens = countable(u64::from(tally.tokens) + u64::from(at(rank)))?;
            for (local, count) in tally.per_expert.iter_mut().enumerate() {
                *count = countable(u64::from(*count) + u64::from(at(ranks + rank * each + local)))?;
            }
        }
        Ok(tally)
    }

    /// Each expert's rows with padding, and all rows.
    pub(crate) fn padded(&self, alignment: u32) -> Result<(Vec<u32>, u32), Error> {
        let pad = |count: &u32| countable(u64::from(*count).next_multiple_of(alignment.into()));
        let padded: Vec<u32> = self.per_expert.iter().map(pad).collect::<Result<_, _>>()?;
        let all = countable(padded.iter().map(|&count| u64::from(count)).sum())?;
        Ok((padded, all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_once_for_each_rank_and_expert() {
        // Two ranks of two experts; rank 0 has three tokens, rank 1 has one.
        let sizes = (2, 4);
        let payloads = [
            payload(&[0, 1, 2, 2, -1, -1], 2, sizes),
            payload(&[3, 0], 2, sizes),
        ];
        let of = |rank| Tally::new(&payloads, rank, sizes).unwrap();
        let tally = |tokens, per_expert: [u32; 2]| Tally {
            tokens,
            per_expert: per_expert.to_vec(),
        };
        assert_eq!(of(0), tally(2, [2, 1]));
        assert_eq!(of(1), tally(2, [1, 1]));
        assert_eq!(of(0).padded(4).unwrap(), (vec![4, 4], 8));
        let error = Tally::new(&[payloads[0].clone(), Vec::new()], 0, sizes).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    }

    #[test]
    fn more_rows_than_can_be_counted_are_refused() {
        let tally = Tally {
            tokens: 1,
            per_expert: vec![1; 4096],
        };
        let (_, all) = tally.padded(1 << 18).unwrap();
        assert_eq!(all, 1 << 30);
        let error = tally.padded(1 << 20).unwrap_err();
        assert!(error.to_string().contains("4294967296 rows"), "{error}");
        let many = (u32::MAX / 2 + 1).to_le_bytes().repeat(2);
        let error = Tally::new(&[many], 0, (1, 1)).unwrap_err();
        assert!(error.to_string().contains("2147483648 rows"), "{error}");
    }
}
