//! What a bench tells: a line for each thing that was measured.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use serde::Serialize;

/// One thing that was measured. As JSON, an object on a line of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    /// What was measured, such as `full_grads/copy/150`.
    pub(crate) name: String,
    /// The world size.
    pub(crate) ranks: usize,
    /// The median over the rounds, of the slowest rank; of memory the most, of any rank.
    pub(crate) median: f64,
    /// The median's: `s`, `bytes`, or a time a parameter, `ns/param` or `us/param`.
    pub(crate) unit: &'static str,
    /// The name of what it is compared with.
    pub(crate) reference: String,
    /// The median over the reference's.
    pub(crate) ratio: f64,
    /// Of what was computed, in SHA-256; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hash: Option<String>,
}

impl Row {
    /// The same, where what was timed is so many times as much as what is told, in another unit.
    pub(crate) fn each(self, count: f64, unit: &'static str) -> Self {
        Self { median: self.median / count, unit, ..self }
    }

    /// The same median over another row's, whose name's first word ends this one's.
    ///
    /// # Panics
    ///
    /// If no row has this name.
    pub(crate) fn over(&self, reference: &str, rows: &[Self]) -> Self {
        let other = rows.iter().find(|row| row.name == reference);
        let other = other.expect("a reference is a row").median;
        let word = reference.split('/').next().unwrap_or_default();
        let name = format!("{}/{word}", self.name);
        Self { name, reference: reference.into(), ratio: self.median / other, ..self.clone() }
    }
}

/// The unit of memory.
pub(crate) const BYTES: &str = "bytes";
/// The unit of time.
pub(crate) const SECONDS: &str = "s";
/// That of updates.
pub(crate) const NANOSECONDS_A_PARAM: &str = "ns/param";
/// That of what is done for each parameter, whatever its size.
pub(crate) const MICROSECONDS_A_PARAM: &str = "us/param";

/// Hexadecimal digits of a hash that a table has room for.
const HASH_SHOWN: usize = 16;

/// For people.
pub(crate) fn table(title: &str, rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max("name".len()) + 2;
    let over = rows.iter().map(|row| row.reference.len()).max().unwrap_or(0).max("over".len()) + 2;
    let mut text = format!("{title}\n\n");
    let mut line = |cells: [&str; 5]| {
        let [name, median, ratio, reference, hash] = cells;
        let line = format!("{name:<width$}{median:>16}{ratio:>8}  {reference:<over$}{hash}");
        writeln!(text, "{}", line.trim_end()).expect("a string takes every text");
    };
    let head = match rows.iter().all(|row| row.unit == BYTES) {
        true => "most",
        false => "median",
    };
    line(["name", head, "ratio", "over", "sha-256"]);
    for row in rows {
        let median = match row.unit {
            BYTES => format!("{:.1} MiB", row.median / f64::from(1 << 20)),
            SECONDS if row.median < 1e-4 => format!("{:.3} us", 1e6 * row.median),
            SECONDS => format!("{:.3} ms", 1e3 * row.median),
            unit => format!("{:.3} {unit}", row.median),
        };
        let ratio = format!("{:.3}", row.ratio);
        let hash = row.hash.as_deref().map_or("", |hash| &hash[..HASH_SHOWN.min(hash.len())]);
        line([&row.name, &median, &ratio, &row.reference, hash]);
    }
    text
}

/// For programs.
pub(crate) fn json(rows: &[Row]) -> String {
    let line = |row| serde_json::to_string(row).expect("a row has no maps") + "\n";
    rows.iter().map(line).collect()
}

/// Writes to standard output.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, hash: Option<&str>) -> Row {
        Row {
            name: name.into(),
            ranks: 2,
            median: 0.25,
            unit: "s",
            reference: "memcpy".into(),
            ratio: 1.5,
            hash: hash.map(str::to_owned),
        }
    }

    #[test]
    fn an_object_has_the_fields_that_every_bench_has() {
        let expected = r#"{"name":"a/1","ranks":2,"median":0.25,"unit":"s","#.to_owned()
            + r#""reference":"memcpy","ratio":1.5}"#
            + "\n";
        assert_eq!(json(&[row("a/1", None)]), expected);
    }

    #[test]
    fn the_table_is_aligned() {
        let table = table("title", &[row("a", None), row("a/longer/name", Some("0123"))]);
        let column = |line: &str| line.find("memcpy").or_else(|| line.find("over"));
        let columns: Vec<_> = table.lines().skip(2).map(column).collect();
        assert!(columns.len() == 3 && columns.iter().all(|at| *at == columns[0]), "{table}");
        assert!(columns[0].is_some(), "{table}");
    }
}
