//! Counts in sentences.

/// A count and what is counted, such as `1 rank` and `2 micro-batches`; `noun` is the singular.
pub fn counted(count: usize, noun: &str) -> String {
    let end = match count {
        1 => "",
        _ if noun.ends_with("ch") || noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let said = |noun| [0, 1, 2].map(|count| counted(count, noun));
        assert_eq!(said("rank"), ["0 ranks", "1 rank", "2 ranks"]);
        assert_eq!(said("process"), ["0 processes", "1 process", "2 processes"]);
        let batches = ["0 micro-batches", "1 micro-batch", "2 micro-batches"];
        assert_eq!(said("micro-batch"), batches);
    }
}
