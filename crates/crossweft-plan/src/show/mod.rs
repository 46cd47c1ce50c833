//! Seeing a plan: one self-contained HTML page.
//!
//! [`page()`] draws what every thread block does under the cost model ([`crate::cost`]), with the checker's
//! verdict. The page is `page.html`, `page.css` and `page.js` with the plan in it as JSON: it loads
//! nothing, and a policy in its head forbids it to. All of the plan's text is data, never markup.
//!
//! **Size.** A page has at most [`MAX_PAGE_BYTES`] bytes. Timelines of further sizes are left out when they
//! would not fit (the page says how many; predicted times stay), and what operations and signals are is
//! written once for all sizes where it is the same. A plan of which not even one timeline fits is
//! refused.

mod data;

use std::collections::HashMap;

use crate::check::Diagnostic;
use crate::cost::{self, CostError, Timeline, Topology};
use crate::plan::Plan;

/// Most bytes of a page.
pub const MAX_PAGE_BYTES: usize = 8 << 20;
/// Most sizes of messages with a timeline of their own.
pub const MAX_TIMELINES: usize = 8;

/// Where a timeline has more steps, times of other sizes are not predicted: they would take too long.
const MAX_SWEEP_STEPS: usize = 1 << 18;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShowError {
    /// There is no prediction.
    #[error("{0}")]
    Cost(#[from] CostError),
    /// The page would be too large.
    #[error(
        "plan `{plan}` has {ops} operations, and {steps} steps with messages of {bytes} bytes: its page \
         would have more than {MAX_PAGE_BYTES} bytes; try a smaller size"
    )]
    TooLarge {
        /// The plan's name.
        plan: String,
        /// Its operations.
        ops: usize,
        /// The smallest size asked for.
        bytes: u64,
        /// Steps with that size: operations, each as often as loops repeat it.
        steps: usize,
    },
    /// Too many sizes are asked for.
    #[error("{sizes} message sizes; at most {MAX_TIMELINES} are drawn")]
    Sizes {
        /// How many were asked for.
        sizes: usize,
    },
}

/// What is shown beside the plan itself.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Sizes of messages in bytes that get a timeline, at most [`MAX_TIMELINES`]; if there are none, some
    /// that the plan is meant for.
    pub bytes: Vec<u64>,
    /// Where operations come from, by rank, thread block and index: a file and line of the program that
    /// made the plan, for instance.
    pub sources: HashMap<(u32, u32, u32), String>,
}

/// A page, and what it says.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Page {
    /// The page.
    pub html: String,
    /// The sizes that have a timeline, and their times in microseconds; `None` if some thread block waits for
    /// ever.
    pub predicted: Vec<(u64, Option<f64>)>,
}

/// Draws `plan` on `topology`, with what the checker found ([`crate::check::check`]).
///
/// # Errors
/// [`ShowError`]: the plan cannot be laid out ([`Plan::validate_layout`]), a size does not fit it, or it is too large.
pub fn page(
    plan: &Plan,
    found: &[Diagnostic],
    topology: &Topology,
    options: &Options,
) -> Result<Page, ShowError> {
    plan.validate_layout().map_err(CostError::from)?;
    if options.bytes.len() > MAX_TIMELINES {
        return Err(ShowError::Sizes {
            sizes: options.bytes.len(),
        });
    }
    let timelines = timelines(plan, topology, &options.bytes)?;
    let sweep = sweep(plan, topology, &timelines)?;
    let room = MAX_PAGE_BYTES - TEMPLATE.len() - STYLE.len() - SCRIPT.len() - 2 * TITLE_BYTES;
    let (data, drawn) = data::encode(plan, found, topology, options, &timelines, &sweep, room)
        .ok_or_else(|| ShowError::TooLarge {
            plan: plan.name.clone(),
            ops: plan.all_ops().count(),
            bytes: timelines.first().map_or(0, |first| first.message_bytes),
            steps: timelines.first().map_or(0, |first| first.steps.len()),
        })?;
    let title: String = plan.name.chars().take(TITLE_BYTES / 8).collect();
    Ok(Page {
        html: fill(&[
            ("$title", &escape(&title)),
            ("$style", STYLE),
            ("$data", &data),
            ("$script", SCRIPT),
        ]),
        predicted: (timelines.iter().take(drawn))
            .map(|timeline| (timeline.message_bytes, timeline.total_us))
            .collect(),
    })
}

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Of the head's title; the page itself shows all of a name.
const TITLE_BYTES: usize = 1024;

/// The template with its marks, in order, replaced; what is put in is not looked at again.
fn fill(parts: &[(&str, &str)]) -> String {
    let mut html = String::new();
    let mut rest = TEMPLATE;
    for (mark, text) in parts {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        html.push_str(before);
        html.push_str(text);
        rest = after;
    }
    html + rest
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Those of `sizes` that the plan is meant for, or the nearest to them that it is.
fn meant(plan: &Plan, sizes: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let unit = plan.message_multiple();
    let (least, most) = plan.message_bytes;
    let least = least.clamp(1, cost::MAX_MESSAGE_BYTES / 2);
    let nearest = |bytes: u64| {
        let bytes = bytes.clamp(least, most.max(least));
        let (down, up) = (bytes / unit * unit, bytes.div_ceil(unit) * unit);
        if up > most && down >= least { down } else { up }
    };
    let mut sizes: Vec<u64> = sizes.into_iter().map(nearest).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn timelines(plan: &Plan, topology: &Topology, wanted: &[u64]) -> Result<Vec<Timeline>, ShowError> {
    if !wanted.is_empty() {
        let mut sizes = wanted.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let predict = |bytes| cost::predict(plan, topology, bytes).map_err(ShowError::from);
        return sizes.into_iter().map(predict).collect();
    }
    let mut found = Vec::new();
    for bytes in meant(plan, [1 << 10, 64 << 10, 1 << 20, 16 << 20]) {
        match cost::predict(plan, topology, bytes) {
            // The smaller sizes do.
            Err(CostError::TooLarge { .. }) if !found.is_empty() => break,
            timeline => found.push(timeline?),
        }
    }
    Ok(found)
}

/// Predicted times by size, those of the timelines among them.
fn sweep(
    plan: &Plan,
    topology: &Topology,
    known: &[Timeline],
) -> Result<Vec<(u64, Option<f64>)>, ShowError> {
    let mut times: Vec<(u64, Option<f64>)> = (known.iter())
        .map(|timeline| (timeline.message_bytes, timeline.total_us))
        .collect();
    if (known.iter()).any(|timeline| timeline.steps.len() > MAX_SWEEP_STEPS) {
        return Ok(times);
    }
    // 8 B to 64 MiB in steps of four, and of two for the last.
    let sizes = (0..12).map(|step| 8 << (2 * step)).chain([64 << 20]);
    for bytes in meant(plan, sizes) {
        if times.iter().any(|(known, _)| *known == bytes) {
            continue;
        }
        match cost::predict(plan, topology, bytes) {
            Err(CostError::TooLarge { .. }) => break,
            timeline => times.push((bytes, timeline?.total_us)),
        }
    }
    times.sort_unstable_by_key(|(bytes, _)| *bytes);
    Ok(times)
}
