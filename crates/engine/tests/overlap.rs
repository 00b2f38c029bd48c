//! Operations that run beside the caller's work: where they run, what that holds, and that a trace
//! shows it.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod common;

use std::fs;
use std::sync::Arc;
use std::thread;

use common::{UNITS, chain, engine, engine_on};
use oxizero::chain::Recompute;
use oxizero::{Backend, Engine, Observer, StepOutcome, Trace};
use oxizero_comm::{Beside, Communicator, overlapped, threads};
use oxizero_core::{DType, Rank, Stage, WorldSize};
use serde_json::Value;

fn world(size: usize) -> Vec<Box<dyn Communicator>> {
    threads::group(WorldSize::new(size).unwrap())
}

fn beside(comm: Box<dyn Communicator>) -> Box<dyn Communicator> {
    overlapped(comm, Beside::default()).unwrap()
}

/// Something that a trace tells of.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    name: String,
    thread: String,
    begin: f64,
    end: f64,
}

impl Told {
    fn lies_within(&self, other: &Self) -> bool {
        other.begin <= self.begin && self.end <= other.end
    }
}

/// Every span of a trace's text, and that each ends.
fn read(text: &str) -> Vec<Told> {
    let events: Vec<Value> = serde_json::from_str(text).unwrap();
    let (mut names, mut open, mut told) = (Vec::new(), Vec::new(), Vec::new());
    for event in &events {
        let thread = event["tid"].as_u64().unwrap() as usize;
        let name = event["name"].as_str().unwrap().to_owned();
        match event["ph"].as_str().unwrap() {
            "M" if name == "thread_name" => {
                assert_eq!(names.len(), thread);
                names.push(event["args"]["name"].as_str().unwrap().to_owned());
            }
            "M" => assert_eq!(event["args"]["name"], "rank 0"),
            "B" => open.push((thread, name, event["ts"].as_f64().unwrap())),
            _ => {
                let last = open.iter().rposition(|(of, ..)| *of == thread).unwrap();
                let (_, began, begin) = open.remove(last);
                assert_eq!(began, name, "what began last ends first");
                let (thread, end) = (names[thread].clone(), event["ts"].as_f64().unwrap());
                told.push(Told { name, thread, begin, end });
            }
        }
    }
    assert!(open.is_empty(), "{open:?}");
    told
}

/// Two steps of a world of so many ranks; of the first, a trace.
fn trace(stage: Stage, ranks: usize, overlaps: bool) -> Vec<Told> {
    let comms = world(ranks).into_iter();
    let comms = comms.map(|comm| if overlaps { beside(comm) } else { comm });
    thread::scope(|scope| {
        let run = |comm: Box<dyn Communicator>| match comm.rank() {
            Rank(0) => traced(stage, comm),
            _ => {
                train(engine(stage, DType::Bf16, 1, comm));
                Vec::new()
            }
        };
        let running: Vec<_> = comms.map(|comm| scope.spawn(move || run(comm))).collect();
        running.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
    })
}

fn train(mut engine: Engine) {
    for _ in 0..2 {
        chain().train(&mut engine, &(), Recompute::Always, 0).unwrap();
        assert!(matches!(engine.step().unwrap(), StepOutcome::Applied { .. }));
    }
}

fn traced(stage: Stage, comm: Box<dyn Communicator>) -> Vec<Told> {
    let folder = std::env::temp_dir().join(format!("oxizero-trace-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let id = format!("{:?}-{stage:?}.json", thread::current().id());
    let path = folder.join(id);
    let trace = Arc::new(Trace::create(&path, Rank(0), WorldSize::ONE).unwrap());
    let observer: Option<Arc<dyn Observer>> = Some(trace.clone());
    let backend = Backend { observer, ..Backend::host(comm) };
    train(engine_on(stage, DType::Bf16, 1, backend));
    let updates = |text: &str| text.matches("update ").count();
    let unfinished = fs::read_to_string(&path).unwrap();
    trace.finish().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(updates(&unfinished), updates(&text), "what a step did is written when it ends");
    let told = read(&text);
    fs::remove_file(&path).unwrap();
    let _unheeded = fs::remove_dir(&folder); // the other tests may have files in it
    told
}

const THREAD: &str = "oxizero-comm";

#[test]
fn one_rank_reduces_beside_its_own_backward() {
    for stage in [Stage::Zero2, Stage::Zero3] {
        let told = trace(stage, 1, true);
        let passes: Vec<_> = told.iter().filter(|told| told.name == "backward pass").collect();
        assert_eq!(passes.len(), 2);
        for pass in passes {
            assert_ne!(pass.thread, THREAD);
            let reduces = told.iter().filter(|told| told.name.starts_with("reduce "));
            let within: Vec<_> = reduces.filter(|told| told.lies_within(pass)).collect();
            // The last one's end may come after the pass.
            assert!((UNITS - 1..=UNITS).contains(&within.len()), "{within:?}");
            assert!(within.iter().all(|told| told.thread == THREAD), "{within:?}");
        }
    }
}

/// Every deed is told of once a step, where it is done.
#[test]
fn a_trace_tells_what_was_done_and_where() {
    for (stage, overlaps) in [(Stage::Zero1, true), (Stage::Zero3, true), (Stage::Zero3, false)] {
        let told = trace(stage, 2, overlaps);
        let count = |name: &str| told.iter().filter(|told| told.name.starts_with(name)).count();
        let gathers = if stage == Stage::Zero3 { 2 * (2 * UNITS + 1) } else { 0 }; // one is tied
        assert_eq!(count("forward "), 2 * UNITS); // the last segment runs forward in backward
        assert_eq!(count("backward "), 2 * (UNITS + 1) + 2);
        assert_eq!((count("reduce "), count("update ")), (2 * UNITS, 2 * UNITS));
        assert_eq!((count("gather "), count("exchange")), (gathers, 4));
        assert_eq!(count("publish "), if stage == Stage::Zero1 { 2 * UNITS } else { 0 });
        for told in told {
            let moves = ["reduce ", "gather ", "publish ", "exchange"];
            let moves = moves.iter().any(|deed| told.name.starts_with(deed));
            assert_eq!(told.thread == THREAD, moves && overlaps, "{told:?}");
        }
    }
}

/// With a reduction in flight or none, on one rank or two.
#[test]
fn an_engine_accounts_for_what_is_planned() {
    for (stage, ranks) in Stage::ALL.into_iter().flat_map(|stage| [(stage, 1), (stage, 2)]) {
        for model in [DType::Bf16, DType::F32] {
            for (accumulation, overlaps) in [(1, false), (1, true), (3, false), (3, true)] {
                thread::scope(|scope| {
                    for comm in world(ranks) {
                        scope.spawn(move || {
                            let comm = if overlaps { beside(comm) } else { comm };
                            check_account(stage, model, accumulation, comm);
                        });
                    }
                });
            }
        }
    }
}

fn check_account(stage: Stage, model: DType, accumulation: usize, comm: Box<dyn Communicator>) {
    let mut engine = engine(stage, model, accumulation, comm);
    for _ in 0..2 {
        for _ in 0..accumulation {
            chain().train(&mut engine, &(), Recompute::Always, 0).unwrap();
            engine.step().unwrap();
        }
        assert_eq!(engine.memory(), engine.plan().rest);
    }
    let plan = engine.plan();
    let context = format!("{stage:?}, {model}, {accumulation}");
    assert_eq!(engine.peak_memory(), plan.peak, "{context}");
    assert_eq!(engine.peak_memory_total(), plan.peak_total(), "{context}");
}
