//! `--plot`: times and bandwidth by size, beside what the link could carry.

use std::path::Path;

use crossweft_plan::cost::Topology;
use plotters::prelude::*;

use super::report::{Header, Row, bus_factor};

const SIZE: (u32, u32) = (960, 880);
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 90, 181),
    RGBColor(220, 50, 32),
    RGBColor(0, 135, 90),
    RGBColor(150, 80, 160),
    RGBColor(200, 130, 0),
    RGBColor(90, 90, 90),
];

/// A line of the picture: its name, then for each size the time in microseconds and the bus bandwidth in GB/s.
pub(super) type Line = (String, Vec<(f64, f64, f64)>);

/// One line for each algorithm if sizes were measured with several, else one.
fn lines(rows: &[Row]) -> Vec<Line> {
    let several = rows.windows(2).any(|two| two[0].bytes == two[1].bytes);
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let name = match several {
            true => row.algorithm.clone(),
            false => "crossweft".to_owned(),
        };
        let time = row.graph_us_p50.unwrap_or(row.time_us_p50);
        let point = (row.bytes as f64, time, row.busbw_gbs);
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    lines
}

/// What the link allows at these sizes, by the cost model's topology.
fn limit(header: &Header, sizes: impl Iterator<Item = f64>) -> Line {
    let (topology, what) = match header.device {
        "cuda" => (Topology::h200(), "H200"),
        _ => (Topology::cpu(), "CPU"),
    };
    let factor = bus_factor(header.measured(), header.ranks);
    let link = topology.node;
    let points = sizes.map(|bytes| {
        // Bytes by GB/s are nanoseconds.
        let time = link.latency_us + bytes * factor / link.gbps / 1000.0;
        (bytes, time, bytes * factor / time / 1000.0)
    });
    (
        format!("limit: one hop over the cost model's {what} link"),
        points.collect(),
    )
}

/// Draws a collective's sizes.
///
/// # Errors
/// Why it could not be drawn or written.
pub(crate) fn draw(path: &Path, header: &Header, rows: &[Row]) -> Result<(), String> {
    let mut all = lines(rows);
    if let Some((_, points)) = all.first() {
        let sizes: Vec<f64> = points.iter().map(|point| point.0).collect();
        all.push(limit(header, sizes.into_iter()));
    }
    let title = format!(
        "{} of {} ranks on {}, {} buffers",
        header.collective.replace('_', "-"),
        header.ranks,
        header.device,
        header.buffers
    );
    draw_lines(path, &title, ("bytes", "bus bandwidth, GB/s"), &all)
}

/// Writes the picture, an SVG file; the last line is the limit.
///
/// # Errors
/// Why it could not be drawn or written.
pub(super) fn draw_lines(
    path: &Path,
    title: &str,
    (size, width): (&str, &str),
    all: &[Line],
) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("--plot {}: {error}", path.display());
    // Logarithmic axes have no 0, and from there on no end.
    let positive = |(name, points): &Line| {
        let points = points.iter().copied();
        let points: Vec<_> = points.filter(|p| p.0 > 0.0 && p.1 > 0.0).collect();
        (!points.is_empty()).then(|| (name.clone(), points))
    };
    let all: Vec<Line> = all.iter().filter_map(positive).collect();
    if all.is_empty() {
        return Err(failed(&"there is no size and no time above 0"));
    }
    let every = || all.iter().flat_map(|(_, points)| points);
    let range = |of: fn(&(f64, f64, f64)) -> f64| {
        every()
            .map(of)
            .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), x| {
                (low.min(x), high.max(x))
            })
    };
    let (sizes, times, widths) = (range(|p| p.0), range(|p| p.1), range(|p| p.2));

    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|e| failed(&e))?;
    let root = root
        .titled(title, ("sans-serif", 22))
        .map_err(|e| failed(&e))?;
    let (upper, lower) = root.split_vertically(SIZE.1 / 2);
    // A size alone would make an empty axis.
    let x = (sizes.0 / 1.2)..(sizes.1 * 1.2);

    let mut chart = ChartBuilder::on(&upper)
        .margin(12)
        .set_label_area_size(LabelAreaPosition::Left, 70)
        .set_label_area_size(LabelAreaPosition::Bottom, 44)
        .build_cartesian_2d(
            x.clone().log_scale().base(2.0),
            (times.0 / 1.5..times.1 * 1.5).log_scale(),
        )
        .map_err(|e| failed(&e))?;
    chart
        .configure_mesh()
        .x_desc(size)
        .y_desc("microseconds a call (median)")
        .max_light_lines(1)
        .x_labels(12)
        .x_label_formatter(&|bytes| human(*bytes))
        .draw()
        .map_err(|e| failed(&e))?;
    for (index, (name, points)) in all.iter().enumerate() {
        let colour = colour(index, all.len());
        let series = LineSeries::new(points.iter().map(|p| (p.0, p.1)), colour.stroke_width(2));
        chart
            .draw_series(series)
            .map_err(|e| failed(&e))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()
        .map_err(|e| failed(&e))?;

    let mut chart = ChartBuilder::on(&lower)
        .margin(12)
        .set_label_area_size(LabelAreaPosition::Left, 70)
        .set_label_area_size(LabelAreaPosition::Bottom, 44)
        .build_cartesian_2d(x.log_scale().base(2.0), 0.0..widths.1 * 1.1)
        .map_err(|e| failed(&e))?;
    chart
        .configure_mesh()
        .x_desc(size)
        .y_desc(width)
        .max_light_lines(1)
        .x_labels(12)
        .x_label_formatter(&|bytes| human(*bytes))
        .draw()
        .map_err(|e| failed(&e))?;
    for (index, (_, points)) in all.iter().enumerate() {
        let colour = colour(index, all.len());
        let series = LineSeries::new(points.iter().map(|p| (p.0, p.2)), colour.stroke_width(2));
        chart.draw_series(series).map_err(|e| failed(&e))?;
    }
    root.present().map_err(|e| failed(&e))
}

/// The colour of a line; the last, the limit, is grey.
fn colour(index: usize, lines: usize) -> RGBColor {
    match index + 1 == lines {
        true => RGBColor(170, 170, 170),
        false => COLOURS[index % COLOURS.len()],
    }
}

fn human(bytes: f64) -> String {
    for (unit, name) in [(30, "G"), (20, "M"), (10, "K")] {
        let unit = f64::from(1_u32 << unit);
        if bytes >= unit {
            return format!("{:.3}{name}", bytes / unit)
                .trim_end_matches(&['0', 'G', 'M', 'K'][..])
                .trim_end_matches('.')
                .to_owned()
                + name;
        }
    }
    format!("{bytes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let said: Vec<_> = [8.0, 1024.0, 1536.0, 114_688.0, 1_048_576.0, 10_485_760.0]
            .map(human)
            .into();
        assert_eq!(said, ["8", "1K", "1.5K", "112K", "1M", "10M"]);
    }
}
