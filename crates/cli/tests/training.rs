//! Small training runs of the whole command: the same numbers however the ranks are run.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use common::{Place, TINY};
use serde_json::Value;

/// The losses and the final weights of one run.
fn run(place: &Place, name: &str, flags: &str) -> (Vec<Value>, Vec<u8>) {
    let words = format!("train tiny.toml --json --run-folder {name} {flags}");
    let events = place.events(&words);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let losses: Vec<Value> = steps.map(|step| step["loss"].clone()).collect();
    assert_eq!(losses.len(), 3, "{words}");
    (losses, std::fs::read(place.path().join(name).join("model.safetensors")).unwrap())
}

#[test]
fn stages_threads_processes_and_buckets_give_the_same_bits() {
    let place = Place::new();
    for ranks in [1, 2, 3, 4] {
        let expected = run(&place, &format!("plain{ranks}"), &format!("--ranks {ranks} --stage 0"));
        let flags = [
            "--stage 1 --bucket-bytes 999",
            "--stage 2 --in-process",
            "--stage 3 --bucket-bytes 1",
            "--stage 3 --in-process --bucket-bytes 100000",
        ];
        for (index, flags) in flags.iter().enumerate() {
            let got = run(&place, &format!("{ranks}-{index}"), &format!("--ranks {ranks} {flags}"));
            assert_eq!(got.0, expected.0, "{ranks} ranks, {flags}");
            assert!(got.1 == expected.1, "{ranks} ranks, {flags}: weights differ");
        }
    }
}

#[test]
fn accumulation_gives_the_same_bits_within_local_and_within_reduced_stages() {
    let place = Place::new();
    let of = |stage: u8| {
        let flags = format!("--ranks 2 --accumulation 3 --stage {stage}");
        run(&place, &format!("accumulated{stage}"), &flags)
    };
    let (zero, one, two, three) = (of(0), of(1), of(2), of(3));
    assert!(zero == one && two == three);
    let number = |losses: &[Value]| losses.last().and_then(Value::as_f64).unwrap();
    let (local, reduced) = (number(&zero.0), number(&two.0));
    assert!((local - reduced).abs() < 1e-3, "{local} {reduced}");
}

#[test]
fn dropout_recomputation_and_odd_shapes_do_not_change_the_bits() {
    let place = Place::new();
    let model = "hidden_size = 18\nintermediate_size = 7\ntied = false\ndropout = 0.2";
    let config = TINY.replace("hidden_size = 16\nintermediate_size = 24", model);
    for dtype in ["f32", "bf16"] {
        let config = config.replace("heads = 2", "heads = 3");
        let precision = format!("{config}[precision]\nmodel = \"{dtype}\"\n");
        place.write("tiny.toml", &precision);
        let expected = run(&place, &format!("{dtype}-expected"), "--ranks 3 --stage 0");
        place.write("tiny.toml", &precision.replace("[train]", "[train]\nrecompute = \"always\""));
        for flags in ["--stage 0", "--stage 2 --in-process", "--stage 3"] {
            let name = format!("{dtype}{}", flags.replace(' ', ""));
            let got = run(&place, &name, &format!("--ranks 3 {flags}"));
            assert!(got == expected, "{dtype} {flags}: {:?} {:?}", got.0, expected.0);
        }
    }
}

#[test]
fn worlds_over_the_same_batch_agree() {
    let place = Place::new();
    let (one, _) = run(&place, "w1", "--ranks 1 --accumulation 4 --stage 2");
    for (ranks, accumulation) in [(2, 2), (4, 1)] {
        let flags = format!("--ranks {ranks} --accumulation {accumulation} --stage 2");
        let (losses, _) = run(&place, &format!("w{ranks}"), &flags);
        for (a, b) in one.iter().zip(&losses) {
            // The sums differ in their order alone, but bf16 weights may round the other way.
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 2e-3, "{ranks} ranks: {a} {b}");
        }
    }
}

#[test]
fn a_run_leaves_configuration_metrics_and_named_weights() {
    let place = Place::new();
    let events = place.events("train tiny.toml --json --in-process --ranks 2");
    let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["start", "evaluation", "step", "step", "step", "evaluation", "end"]);
    let end = events.last().unwrap();
    assert_eq!(end["ranks"], 2);
    assert!(end["bits_per_byte_after"].as_f64() < end["bits_per_byte_before"].as_f64());
    let folder = place.path().join("runs/0001");
    let metrics = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let metrics: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(metrics, events);
    let config = std::fs::read_to_string(folder.join("config.toml")).unwrap();
    let config = oxizero_core::Config::from_toml(&config).unwrap();
    assert_eq!((config.run.ranks, config.model.hidden_size), (2, 16));
    let model = std::fs::read(folder.join("model.safetensors")).unwrap();
    let model = safetensors::SafeTensors::deserialize(&model).unwrap();
    let embedding = model.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!(embedding.shape(), [256, 16]);
    assert!(model.names().contains(&"model.layers.1.mlp.down_proj.weight"));
    assert_eq!(place.events("train tiny.toml --json --in-process")[0]["folder"], "runs/0002");
}

#[test]
fn a_run_does_not_train_on_what_earlier_runs_left() {
    let place = Place::new();
    let text = |flags: &str| {
        let words = format!("train tiny.toml --json --in-process --steps 1 --data . {flags}");
        place.events(&words)[0]["text"].clone()
    };
    let text = [text(""), text("--run-folder out"), text("")].map(|text| text.to_string());
    let hash = |text: &str| text.split("sha256").last().unwrap().to_owned();
    assert_eq!(hash(&text[0]), hash(&text[1]));
    assert_eq!(hash(&text[0]), hash(&text[2]));
    assert!(text[2].contains("without 2 hidden files, caches and runs"), "{}", text[2]);
}

#[test]
fn people_get_a_table_and_a_sample() {
    let place = Place::new();
    let output = place.run("train tiny.toml --ranks 2 --stage 3 --in-process");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for words in ["sha256", "step 3/3", "data-parallel", "gathered weights", "A sample:\nVerse"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let plan = place.run("plan tiny.toml --stage 3");
    assert!(String::from_utf8_lossy(&plan.stdout).contains("optimizer states"));
}
