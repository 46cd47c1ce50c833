//! Mixture of experts: *dispatch* sends each token to the ranks of its experts, *combine* brings back what these made
//! of it, weighted and summed.
//!
//! * [`Group`]: long-lived; all ranks' memory for such calls, made once for the largest that will come.
//! * [`Handle`]: one forward pass: where its tokens go ([`Routing`]), and where those that came lie ([`Counts`]).
//! * [`Layout`]: how received tokens are laid out; [`OutputShape`]: how much room that takes.
//!
//! A token crosses once to each rank that has one of its experts. Rows are placed by prefix sums, always by source
//! rank and then token, and all sums have one order: the same calls give the same bits.
//!
//! ```
//! # use std::sync::Arc;
//! # use std::time::{Duration, Instant};
//! # use crossweft_channel::Endpoint;
//! # use crossweft_net::{JoinOptions, Rendezvous, RendezvousOptions};
//! use crossweft_moe::{DispatchOutput, Experts, Group, GroupOptions, Layout, Routing, Tokens, Weights};
//!
//! # let rendezvous = Rendezvous::start(&RendezvousOptions::default())?;
//! # let job = crossweft_net::Group::join(&rendezvous.unique_id(), 0, 1, &JoinOptions::default())?;
//! # let deadline = Instant::now() + Duration::from_secs(30);
//! # let endpoint = Endpoint::new(Arc::new(job), deadline)?;
//! // On every rank: 4 experts, up to 2 tokens of 8 bf16, each for 2 experts.
//! let group = Group::new(&endpoint, GroupOptions::new(4, 2, 8, 2), deadline)?;
//! let routing = Routing {
//!     experts: Experts::I32(&[0, 3, 1, -1]),
//!     top_k: 2,
//!     weights: Some(&[0.75, 0.25, 1.0, 0.0]),
//! };
//! let mut handle = group.handle(&routing, Layout::ExpertMajor)?;
//!
//! let tokens = [0x80, 0x3f].repeat(16); // 1.0, in bf16
//! let shape = group.output_shape(Layout::ExpertMajor, Tokens::Plain(&tokens).format(), 2)?;
//! let mut received = vec![0; shape.token_bytes() as usize];
//! handle.dispatch(Tokens::Plain(&tokens), DispatchOutput::new(&mut received))?;
//! assert_eq!(handle.counts()?.per_expert(), [1, 1, 0, 1]);
//!
//! // .. the experts compute in `received` ..
//! let mut combined = vec![0; 32];
//! handle.combine(&received, Weights::Dispatched, &mut combined)?;
//! assert_eq!(combined, tokens);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `unsafe` is confined to the module `launch`, which hands tables to the device code
//! ([`crossweft_device::moe`], which says how everything travels), and to `cuda` and `device_pass`, which launch its
//! kernels.
#![deny(missing_docs, unsafe_code)]

mod cuda;
mod device_pass;
mod error;
mod group;
mod handle;
mod launch;
mod layout;
mod watch;

pub use crossweft_device::DataType;
pub use crossweft_hal::cpu::Schedule;
pub use cuda::{DeviceCounts, DeviceOutput, DeviceRouting, DeviceTokens, DeviceWeights};
pub use device_pass::{DevicePass, Received, Recorded, RecordedPasses};
pub use error::MoeError;
pub use group::{Group, GroupOptions};
pub use handle::{Counts, DispatchOutput, Experts, ExpertsMut, Handle, Routing, Tokens, Weights};
pub use layout::{Format, Layout, OutputShape, ScaleType};
