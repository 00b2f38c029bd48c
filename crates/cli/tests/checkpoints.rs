//! Runs that stop and go on, and what is in their checkpoints.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use std::fs;

use common::Place;
use serde_json::Value;

/// The losses of a run's steps, from 1, and its final weights.
fn run(place: &Place, name: &str, flags: &str) -> (Vec<(u64, Value)>, Vec<u8>) {
    let events = place.events(&format!("train --json --run-folder {name} {flags}"));
    let steps = events.iter().filter(|event| event["event"] == "step");
    let losses = steps.map(|step| (step["step"].as_u64().unwrap(), step["loss"].clone()));
    (losses.collect(), fs::read(place.path().join(name).join("model.safetensors")).unwrap())
}

#[test]
fn a_run_that_goes_on_is_the_run_that_did_not_stop() {
    let place = Place::new();
    let config = "tiny.toml --ranks 2 --stage 2 --accumulation 3 --steps 6";
    let straight = run(&place, "straight", &format!("{config} --save-every 2 --keep-last 0"));
    let checkpoints = place.path().join("straight/checkpoints");
    assert_eq!(fs::read_to_string(checkpoints.join("latest")).unwrap(), "step-000006\n");
    for step in [2, 4] {
        fs::write(checkpoints.join("latest"), format!("step-{step:06}\n")).unwrap();
        for flags in ["", "--stage 0 --in-process", "--stage 3", "--stage 1 --save-every 1"] {
            let name = format!("from {step} {flags}").replace([' ', '-'], "_");
            let resumed = run(&place, &name, &format!("--resume straight {flags}"));
            let same_order = !flags.contains("stage 0") && !flags.contains("stage 1");
            assert_eq!(resumed.0[0].0, step + 1);
            if same_order {
                assert_eq!(resumed.0, straight.0[step as usize..], "{flags}");
                assert!(resumed.1 == straight.1, "{flags}: weights differ");
            }
        }
    }
}

#[test]
fn other_ranks_keep_the_global_batch_or_are_refused() {
    let place = Place::new();
    run(&place, "six", "tiny.toml --ranks 6 --accumulation 1 --steps 2 --save-every 2");
    let resumed = run(&place, "three", "--resume six --ranks 3 --steps 4");
    assert_eq!(resumed.0.len(), 2);
    let config = fs::read_to_string(place.path().join("three/config.toml")).unwrap();
    assert!(config.contains("gradient_accumulation_steps = 2"), "{config}");
    let refused = place.run("train --resume six --ranks 4 --steps 4");
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("the same batch on 1, 2, 3 or 6 ranks, or "), "{said}");
}

/// The evaluations of a run, before, between and after its steps.
fn evaluations(place: &Place, words: &str) -> Vec<f64> {
    let events = place.events(&format!("train tiny.toml --json {words}"));
    let evaluations = events.iter().filter(|event| event["event"] == "evaluation");
    evaluations.map(|event| event["bits_per_byte"].as_f64().unwrap()).collect()
}

#[test]
fn a_run_starts_from_the_weights_of_files() {
    let place = Place::new();
    let first = evaluations(&place, "--ranks 2 --run-folder first --save-every 3");
    place.run("convert first --to safetensors hub --shard-size 4KiB");
    assert!(place.path().join("hub/model.safetensors.index.json").exists());
    for (files, flags) in [("first/model.safetensors", "--ranks 3"), ("hub", "--in-process")] {
        let next = evaluations(&place, &format!("--init-from {files} {flags}"));
        assert_eq!(next[0], *first.last().unwrap(), "{files}");
        assert_ne!(next.last(), first.last());
    }
    place.write("wider.toml", &common::TINY.replace("layers = 2", "layers = 3"));
    let refused = place.run("train wider.toml --init-from first/model.safetensors");
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("it has no `model.layers.2") && said.contains("[model]"), "{said}");
    assert!(!place.path().join("runs/0003").exists());
}

/// A model that `common::TINY` is not, as a configuration and as the hub's `config.json`.
const GPT2: &str = r#"
[model]
kind = "gpt2"
vocab_size = 260
hidden_size = 24
intermediate_size = 96
layers = 1
heads = 3
kv_heads = 3
context = 16
positions = 20
norm_eps = 1e-4
"#;
const GPT2_JSON: &str = r#"{
  "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 260, "n_embd": 24,
  "n_inner": null, "n_layer": 1, "n_head": 3, "n_positions": 20, "layer_norm_epsilon": 1e-4,
  "activation_function": "gelu_new", "attn_pdrop": 0.1, "tie_word_embeddings": true
}"#;

#[test]
fn the_model_is_the_one_that_config_json_tells() {
    let place = Place::new();
    let rest = common::TINY.split_once("[schedule]").unwrap().1;
    place.write("gpt2.toml", &format!("{GPT2}[schedule]{rest}"));
    place.write("bare.toml", &format!("[model]\ncontext = 16\n[schedule]{rest}"));
    run(&place, "first", "gpt2.toml --stage 3 --save-every 3");
    place.run("convert first --to safetensors hub");
    place.write("hub/config.json", GPT2_JSON);
    let words = |config: &str| format!("train {config} --json --init-from hub --ranks 1");
    let first =
        place.events("train gpt2.toml --json --init-from first/model.safetensors --ranks 1");
    assert_eq!(first[1], place.events(&words("bare.toml"))[1]);
    assert_eq!(first[1], place.events(&words("gpt2.toml"))[1]);

    let refusals = [
        ("tiny.toml", "n_inner", "model.heads is 2 in the configuration, and 3 by"),
        ("long.toml", "n_inner", "model.context is 21 in the configuration, and the model has 20"),
        ("bare.toml", "rotary_pct", "hub/config.json: unknown field `rotary_pct`"),
        ("bare.toml", "n_layer", "it has no `transformer.h.1."),
    ];
    place.write("long.toml", "model.context = 21");
    for (config, field, expected) in refusals {
        let json = GPT2_JSON.replace("\"n_layer\": 1", "\"n_layer\": 2");
        let json = if field == "n_layer" { &json } else { GPT2_JSON };
        let json = match field {
            "rotary_pct" => json.replace("{", "{\"rotary_pct\": 0.5,"),
            _ => json.to_owned(),
        };
        place.write("hub/config.json", &json);
        let refused = place.run(&words(config));
        assert_eq!(refused.status.code(), Some(2));
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_checkpoint_is_inspected_verified_and_converted() {
    let place = Place::new();
    let trained = run(&place, "run", "tiny.toml --ranks 3 --save-every 3");
    let output = place.run("inspect run --verify");
    let said = String::from_utf8(output.stdout).unwrap();
    for words in
        ["3 applied steps", "3 ranks", "AdamW", "model.embed_tokens.weight", "as they were"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
    let output = place.run("convert run --to safetensors out");
    assert_eq!(output.stdout, b"out/model.safetensors\n");
    let written = fs::read(place.path().join("out/model.safetensors")).unwrap();
    let tensors = |text: &[u8]| {
        let file = safetensors::SafeTensors::deserialize(text).unwrap();
        let mut tensors: Vec<_> = file
            .iter()
            .map(|(name, tensor)| {
                (name.to_owned(), tensor.shape().to_vec(), tensor.data().to_vec())
            })
            .collect();
        tensors.sort();
        tensors
    };
    assert!(tensors(&written) == tensors(&trained.1), "other weights than the run wrote");
    let damaged = place.path().join("run/checkpoints/step-000003/pieces-00001.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let output = place.run("inspect run --verify");
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("pieces-00001.safetensors"), "{said}");
    let output = place.run("inspect nothing");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_the_python_package_converts_is_said() {
    let place = Place::new();
    let refused = place.run("convert --from deepspeed theirs ours");
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("`python -m oxizero.convert_deepspeed theirs ours`"), "{said}");
    assert_eq!(place.run("convert theirs ours").status.code(), Some(2));
}
