//! The report as text in two columns.

/// Text in two columns: labels, and what is found.
pub(super) struct Page(pub(super) String);

/// Characters in a line.
pub(super) const WIDTH: usize = 100;
/// Where the second column starts; a PCI address fits before it.
pub(super) const COLUMN: usize = 18;

impl Page {
    pub(super) fn section(&mut self, title: &str) {
        self.0.push_str(&format!("\n{title}\n"));
    }

    /// A label and its text, which is wrapped within its column.
    pub(super) fn row(&mut self, label: &str, text: &str) {
        let label: String = label.chars().take(COLUMN - 4).collect();
        let mut line = format!("{:<COLUMN$}", format!("  {label}"));
        let mut used = COLUMN;
        for word in text.split_whitespace() {
            let length = word.chars().count();
            if used > COLUMN && used + 1 + length > WIDTH {
                line.push_str(&format!("\n{:COLUMN$}", ""));
                used = COLUMN;
            }
            if used > COLUMN {
                line.push(' ');
                used += 1;
            }
            // A word that no line can hold is cut.
            line.extend(word.chars().take(WIDTH - COLUMN));
            used += length.min(WIDTH - COLUMN);
        }
        self.0.push_str(line.trim_end());
        self.0.push('\n');
    }
}

pub(super) fn found(value: Option<&str>) -> &str {
    value.unwrap_or("not found")
}

pub(super) fn found_number(value: Option<usize>) -> String {
    value.map_or("not found".to_owned(), |value| value.to_string())
}

pub(super) fn found_size(bytes: Option<u64>) -> String {
    bytes.map_or("not found".to_owned(), size)
}

pub(super) fn list(items: impl Iterator<Item = String>, empty: &str) -> String {
    let items = items.collect::<Vec<_>>().join(", ");
    if items.is_empty() {
        empty.to_owned()
    } else {
        items
    }
}

/// A number of bytes in the largest unit that it fills.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {}", units[unit])
}
