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
            tally.tokens += at(rank);
            for (local, count) in tally.per_expert.iter_mut().enumerate() {
                *count += at(ranks + rank * each + local);
            }
        }
        Ok(tally)
    }

    /// Each expert's rows with padding.
    pub(crate) fn padded(&self, alignment: u32) -> Vec<u32> {
        let counts = self.per_expert.iter();
        counts
            .map(|count| count.next_multiple_of(alignment))
            .collect()
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
        assert_eq!(of(0).padded(4), [4, 4]);
        let error = Tally::new(&[payloads[0].clone(), Vec::new()], 0, sizes).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
