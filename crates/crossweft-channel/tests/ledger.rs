//! What ranks say of their calls is compared as they make them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{deadline, ranks};
use crossweft_channel::{Difference, Ledger};

#[test]
fn the_later_of_two_ranks_hears_of_a_difference() {
    ranks(3, |endpoint| {
        let ledger = Ledger::new(&endpoint, deadline()).unwrap();
        let rank = endpoint.rank();
        let turn = |who: u32, act: &dyn Fn()| {
            if rank == who {
                act();
            }
            endpoint.group().barrier(deadline()).unwrap();
        };
        for call in 0..3000 {
            assert_eq!(ledger.note((call, 7)), None);
        }
        endpoint.group().barrier(deadline()).unwrap();
        turn(1, &|| assert_eq!(ledger.note((1, 7)), None));
        let theirs = |rank, theirs| Some(Difference { rank, theirs });
        turn(0, &|| assert_eq!(ledger.note((1, 8)), theirs(1, (1, 7))));
        turn(2, &|| assert_eq!(ledger.note((1, 8)), theirs(1, (1, 7))));
        // The next call is another one.
        assert_eq!(ledger.note((5, 5)), None);
        endpoint.group().barrier(deadline()).unwrap();
    });
}
