//! Runs that read their text by a tokenizer.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use common::Place;
use serde_json::{Value, json};

/// The words of the text, by their number, and a token that ends a document.
fn tokenizer(first: u32) -> String {
    let words = ["?", "Verse", "the", "of", "many", "lines", "more", "to", "come", ":", ".", "\n"];
    let vocab: serde_json::Map<_, _> =
        words.iter().zip(first..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 290, "content": "<|endoftext|>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    })
    .to_string()
}

fn refusal(place: &Place, words: &str) -> String {
    let refused = place.run(words);
    assert_eq!(refused.status.code(), Some(2), "{words}");
    String::from_utf8(refused.stderr).unwrap()
}

fn evaluation(events: &[Value], index: usize) -> f64 {
    let mut evaluations = events.iter().filter(|event| event["event"] == "evaluation");
    evaluations.nth(index).unwrap()["bits_per_byte"].as_f64().unwrap()
}

#[test]
fn a_text_is_trained_on_as_tokens_and_goes_on_with_the_same_alone() {
    let place = Place::new();
    place.write("words.json", &tokenizer(5));
    let small = common::TINY.replace("[model]", "[model]\nvocab_size = 291");
    place.write("words.toml", &small);
    let train = "train words.toml --json --tokenizer words.json --save-every 2 --steps 4";
    let straight = place.events(&format!("{train} --run-folder straight"));

    // Before training all of 291 tokens are about as likely; the text has fewer tokens than bytes.
    let before = evaluation(&straight, 0);
    assert!(before > 0.0 && before < 0.6 * 291_f64.log2(), "{before} bits per byte");
    let end = straight.last().unwrap();
    let sample = end["sample"].as_str().unwrap();
    assert!(sample.starts_with("Verse") || sample.starts_with("<|endoftext|>"), "{sample}");

    place.write("straight/checkpoints/latest", "step-000002\n");
    let resumed = place.events("train --json --resume straight --run-folder on");
    assert_eq!(evaluation(&resumed, 1), evaluation(&straight, 1));

    place.write("other.json", &tokenizer(6));
    let said = refusal(&place, "train --resume straight --tokenizer other.json");
    for words in ["step-000002", "tokens of `words.json` (sha256 ", "tokens of `other.json`"] {
        assert!(said.contains(words), "{said}");
    }
    place.write("words.json", &tokenizer(6));
    let said = refusal(&place, "train --resume straight");
    assert!(said.contains("give the same tokenizer"), "{said}");
}

#[test]
fn bytes_and_tokens_do_not_go_on_with_each_other() {
    let place = Place::new();
    place.write("words.json", &tokenizer(5));
    let train = "train tiny.toml --json --save-every 3 --run-folder bytes";
    place.events(train);
    place.write("wide.toml", &common::TINY.replace("[model]", "[model]\nvocab_size = 291"));
    let said = refusal(&place, "train wide.toml --resume bytes --tokenizer words.json");
    assert!(said.contains("was trained on bytes, and the run is to read tokens of"), "{said}");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let place = Place::new();
    place.write("far.json", &tokenizer(300));
    let said = refusal(&place, "train tiny.toml --tokenizer far.json");
    assert!(said.contains("model.vocab_size = 256") && said.contains("312 or more"), "{said}");
    place.write("words.json", &tokenizer(5));
    let said = refusal(&place, "train tiny.toml --tokenizer text.txt");
    assert!(said.contains("`text.txt` is no tokenizer"), "{said}");
    let said = refusal(&place, "train tiny.toml --tokenizer absent.json");
    assert!(said.contains("absent.json"), "{said}");
    place.write("short.txt", &"to be or not to be ".repeat(10));
    place.write("wide.toml", &common::TINY.replace("[model]", "[model]\nvocab_size = 291"));
    let said = refusal(&place, "train wide.toml --tokenizer words.json --data short.txt");
    assert!(said.contains("tokens") && said.contains("too short"), "{said}");
}
