//! What NCCL's device interface asks of the host.
//!
//! Its kernels read structures whose bytes belong to one version of NCCL, so there is none of it here: what would
//! make such a structure says so. What only asks where peers' memory is, or who they are, is answered.

use super::{calls, exports, on, signed, success, unsigned, value};
use crate::config::MAGIC;
use crate::pointer::{Address, Out, Versioned};
use crate::status::{Error, Status};
use crate::table;

/// `ncclTeam_t`: ranks of a communicator at equal distances, as one of them sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Team {
    count: i32,
    rank: i32,
    stride: i32,
}

impl Team {
    const NONE: Self = Self {
        count: 0,
        rank: 0,
        stride: 0,
    };

    /// All ranks of a communicator. They are on one host, so each can load from and store to all others.
    fn world(comm: Address) -> Result<Self, Error> {
        on(comm, |comm| {
            Ok(Self {
                count: signed(comm.world_size()?),
                rank: signed(comm.rank()?),
                stride: 1,
            })
        })
    }

    /// The rank in the world of rank `rank` of this team, as `world`'s own rank sees it.
    fn in_world(self, world: Self, rank: i32) -> i32 {
        let distance = rank.wrapping_sub(self.rank).wrapping_mul(self.stride);
        world.rank.wrapping_add(distance)
    }
}

fn declined(what: &str) -> Result<Status, Error> {
    Err(Error::unsupported(
        what,
        "kernels that include NCCL's device headers need NCCL itself; crossweft's own are in \
         include/crossweft/device.cuh",
    ))
}

fn place_of(
    window: Address,
    offset: usize,
    rank: i32,
    place: &Out<Address>,
) -> Result<Status, Error> {
    let window = table::window(window)?;
    let address = window.address_of(unsigned("peer", rank)?, offset as u64)?;
    place.set("outPtr", Address::of(address)).map(success)
}

/// `ncclCommProperties_t` after its size, magic and version: to byte 144, as in 2.31 and 2.32.
const PROPERTIES: usize = 144;

calls! {
    fn ncclCommQueryProperties(comm: Address, properties: Versioned) {
        let mut fields = [0; PROPERTIES];
        let size = properties.read("props", &mut fields)?;
        if size < 16 || fields[8..12] != MAGIC.to_ne_bytes() {
            return Err(Error::argument(
                "ncclCommProperties_t was not initialised with NCCL_COMM_PROPERTIES_INITIALIZER",
            ));
        }
        on(comm, |comm| {
            let communicator = comm.communicator()?;
            let tag = communicator.endpoint().group().tag();
            let hash = u128::from_be_bytes(tag).to_ne_bytes();
            fields[16..].fill(0);
            let numbers = [
                (16, signed(communicator.rank())),
                (20, signed(communicator.world_size())),
                (24, comm.device()?),
                // No number of any management library.
                (28, -1),
                // One team of ranks that can load from each other.
                (40, 1),
            ];
            for (offset, number) in numbers {
                fields[offset..offset + 4].copy_from_slice(&number.to_ne_bytes());
            }
            // hostRmaSupport: ncclPutSignal and its like.
            fields[44] = 1;
            fields[56..64].copy_from_slice(&hash[..8]);
            properties.write(size, 16, &fields[16..]);
            Ok(Status::Success)
        })
    }

    fn ncclDevCommCreate(comm: Address, _requirements: Address, _place: Address) {
        on(comm, |_| declined("the device communicator of NCCL (ncclDevCommCreate)"))
    }

    fn ncclDevCommDestroy(comm: Address, _device_comm: Address) {
        on(comm, |_| declined("the device communicator of NCCL (ncclDevCommDestroy)"))
    }

    fn ncclGetLsaDevicePointer(window: Address, offset: usize, rank: i32, place: Out<Address>) {
        place_of(window, offset, rank, &place)
    }

    fn ncclGetPeerDevicePointer(window: Address, offset: usize, peer: i32, place: Out<Address>) {
        place_of(window, offset, peer, &place)
    }

    fn ncclGetLsaMultimemDevicePointer(_window: Address, _offset: usize, _place: Address) {
        declined("multicast memory (ncclGetLsaMultimemDevicePointer)")
    }

    fn ncclGetMultimemDevicePointer(_window: Address, _offset: usize, _handle: u64, _place: Address) {
        declined("multicast memory (ncclGetMultimemDevicePointer)")
    }

    fn ncclGetMultimemDeviceLeInfo(_window: Address, _offset: usize, _id: Address, _place: Address) {
        declined("the compute fabric transport (ncclGetMultimemDeviceLeInfo)")
    }

    fn ncclGetCftDeviceLeInfo(
        _window: Address, _offset: usize, _peer: i32, _team: Team, _id: Address, _place: Address,
    ) {
        declined("the compute fabric transport (ncclGetCftDeviceLeInfo)")
    }

    fn ncclGetPeerDeviceLeInfo(
        _window: Address, _offset: usize, _peer: i32, _id: Address, _place: Address,
    ) {
        declined("the compute fabric transport (ncclGetPeerDeviceLeInfo)")
    }

    fn ncclLsaBarrierCreateRequirement(_team: Team, _count: i32, _handle: Address, _requirement: Address) {
        declined("ncclLsaBarrierCreateRequirement")
    }

    fn ncclGinBarrierCreateRequirement(
        comm: Address, _team: Team, _count: i32, _handle: Address, _requirement: Address,
    ) {
        on(comm, |_| declined("ncclGinBarrierCreateRequirement"))
    }

    fn ncclLLA2ACreateRequirement(_blocks: i32, _slots: i32, _handle: Address, _requirement: Address) {
        declined("ncclLLA2ACreateRequirement")
    }

    fn ncclGinInboxA2ACreateRequirement(
        _peers: Team, _blocks: i32, _size: i32, _handle: Address, _requirement: Address,
    ) {
        declined("ncclGinInboxA2ACreateRequirement")
    }

    fn ncclGinOutboxCreateRequirement(_blocks: i32, _size: i32, _handle: Address, _requirement: Address) {
        declined("ncclGinOutboxCreateRequirement")
    }
}

exports! {
    fn ncclTeamWorld(comm: Address) -> Team {
        value("ncclTeamWorld", Team::NONE, || Team::world(comm))
    }

    fn ncclTeamLsa(comm: Address) -> Team {
        value("ncclTeamLsa", Team::NONE, || Team::world(comm))
    }

    /// The ranks with this one's place in other hosts' teams: itself.
    fn ncclTeamRail(comm: Address) -> Team {
        value("ncclTeamRail", Team::NONE, || {
            let Team { count: stride, .. } = Team::world(comm)?;
            Ok(Team { count: 1, rank: 0, stride })
        })
    }

    fn ncclTeamRankToWorld(comm: Address, team: Team, rank: i32) -> i32 {
        value("ncclTeamRankToWorld", -1, || Ok(team.in_world(Team::world(comm)?, rank)))
    }

    fn ncclTeamRankToLsa(comm: Address, team: Team, rank: i32) -> i32 {
        value("ncclTeamRankToLsa", -1, || Ok(team.in_world(Team::world(comm)?, rank)))
    }

    /// There is no compute fabric: a team of nobody.
    fn ncclTeamCft(comm: Address, _mode: i32) -> Team {
        value("ncclTeamCft", Team::NONE, || {
            Team::world(comm)?;
            declined("the compute fabric transport (ncclTeamCft)").map(|_| Team::NONE)
        })
    }

    fn ncclTeamCftMultimem(comm: Address) -> Team {
        value("ncclTeamCftMultimem", Team::NONE, || {
            Team::world(comm)?;
            declined("the compute fabric transport (ncclTeamCftMultimem)").map(|_| Team::NONE)
        })
    }

    /// Slots of 8 bytes for `elements` elements of `size` bytes.
    fn ncclLLA2ACalcSlots(elements: i32, size: i32) -> i32 {
        let slots = i64::from(elements) * i64::from(size).max(0).div_euclid(8)
            + if size > 0 && size % 8 != 0 { i64::from(elements) } else { 0 };
        i32::try_from(slots.max(0)).unwrap_or(i32::MAX)
    }
}
