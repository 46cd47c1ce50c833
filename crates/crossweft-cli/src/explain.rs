//! `crossweft explain`: what a size takes, without starting ranks.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use crossweft_collective::{
    CollectiveError, DataType, DeviceKind, Devices, Explanation, Fingerprint, ReduceOp, Request,
    Selection,
};

use crate::doctor::DEFAULT_RANKS;
use crate::exit::Exit;
use crate::values::{Buffers, Device, Name, Size, dtype, op, plan_file};
use crate::{Format, complain, ended, print_line};

/// Options of `explain`.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// The collective.
    #[arg(value_enum)]
    collective: Name,
    /// Size in bytes, of the larger of input and output, as `bench` counts; K, M and G are powers of 1024.
    #[arg(long, value_name = "BYTES")]
    bytes: Size,
    /// Number of ranks.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RANKS,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DataType,
    /// Reduce operation.
    #[arg(long, default_value = "sum", value_parser = op)]
    op: ReduceOp,
    /// The root, of collectives from or to one rank.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u32,
    /// What ranks compute on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Where buffers lie.
    #[arg(long, value_enum, default_value_t = Buffers::Symmetric)]
    buffers: Buffers,
    /// One buffer for input and output.
    #[arg(long)]
    in_place: bool,
    /// Sums in rank order, whatever the size, as with CROSSWEFT_DETERMINISTIC=1.
    #[arg(long)]
    deterministic: bool,
    /// A plan to choose from beside the built-in algorithms, of crossweft or of MSCCL++; may be repeated.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(plan_file))]
    plan: Vec<PathBuf>,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

pub(crate) fn run(options: &Explain) -> Exit {
    ended(explain(options).and_then(|explanation| {
        print_line(&match options.format {
            Format::Table => explanation.to_string().trim_end().to_owned(),
            Format::Json => explanation.to_json(),
        })
    }))
}

fn explain(options: &Explain) -> Result<Explanation, String> {
    let Explain {
        collective,
        bytes,
        ranks,
        dtype,
        op,
        root,
        device,
        buffers,
        in_place,
        ..
    } = *options;
    let collective = collective.collective(root);
    if collective.root().is_some_and(|root| root >= ranks) {
        return Err(format!("--root {root}, but there are {ranks} ranks"));
    }
    let (i, o) = collective.blocks(ranks).unwrap_or((1, 1));
    let element = dtype.size() as u64;
    let message = bytes.0 / u64::from(i.max(o)) / element * element;
    let selection = selection(options)?;
    let request = Request {
        collective,
        world_size: ranks,
        dtype,
        op,
        place: buffers.place(in_place),
        in_place: Some(in_place),
        device: kind(device, ranks),
        max_bytes: message,
        most_blocks: u32::MAX,
        deterministic: options.deterministic || selection.is_deterministic(),
    };
    Ok(Explanation::new(&request, message, &selection))
}

fn kind(device: Device, ranks: u32) -> DeviceKind {
    match device {
        Device::Cuda => DeviceKind::Cuda,
        device => match device.find(ranks) {
            Ok(Devices::Cuda(_)) => DeviceKind::Cuda,
            _ => DeviceKind::Cpu,
        },
    }
}

/// What such ranks would choose by.
fn selection(options: &Explain) -> Result<Selection, String> {
    let say = |error: CollectiveError| error.to_string();
    let ranks = options.ranks;
    let mut selection = match options.device.find(ranks) {
        Ok(devices) => {
            let fingerprint = Fingerprint::of_this_host(&devices, ranks);
            let fingerprint = fingerprint.map_err(|error| error.to_string())?;
            Selection::from_environment(fingerprint, ranks).map_err(|error| say(error.into()))?
        }
        // What GPUs would take can be told without any.
        Err(reason) => {
            complain(&format!(
                "note: {reason}; there is no tuning table of such GPUs"
            ));
            let selection = Selection::from_environment(Fingerprint::unknown(), ranks);
            selection.map_err(|error| say(error.into()))?
        }
    };
    for warning in selection.warnings() {
        complain(&format!("warning: {warning}"));
    }
    for plan in &options.plan {
        let registered = selection.registry_mut().register_file(plan);
        registered.map_err(|error| error.to_string())?;
    }
    Ok(selection)
}
