//! Ranks as processes hold what the plan says: shared memory as the kernel counts it, and one copy
//! of replicated model weights for all of them; the rest by a counting allocator.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;

use common::{NUMEL, OTHERS, REGIONS, REGIONS_PEAK, UNITS, chain, engine};
use oxizero::chain::Recompute;
use oxizero_comm::shm;
use oxizero_core::{DType, Rank, Stage, WorldSize};

const RANKS: usize = 2;
/// Room for what the group keeps of itself: slots, counters, whole pages.
const CONTROL: usize = 128 << 10;
const RANK: &str = "OXIZERO_TEST_RANK";
const STAGE: &str = "OXIZERO_TEST_STAGE";
const SOCKET: &str = "OXIZERO_TEST_SOCKET";

/// Bytes of the group's memfd that are backed by memory, and this process's heap regions.
fn measure(stage: Stage, rank: usize, socket: &str) -> (usize, usize) {
    let world_size = WorldSize::new(RANKS).unwrap();
    let comm = shm::connect(shm::Options::new(Rank(rank), world_size, socket)).unwrap();
    let before = mapped();
    let mut engine = engine(stage, DType::Bf16, 2, comm);
    for _ in 0..4 {
        chain().train(&mut engine, &(), Recompute::Always, 0).unwrap();
        engine.step().unwrap();
    }
    engine.communicator().barrier().unwrap();
    let held = (mapped() - before, REGIONS.load(SeqCst));
    engine.communicator().barrier().unwrap();
    assert!(OTHERS.load(SeqCst) < 1 << 20 && REGIONS_PEAK.load(SeqCst) >= held.1);
    held
}

fn mapped() -> usize {
    let is_memfd = |path: &std::path::Path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:"))
    };
    let paths = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let memfds = paths.filter(|path| is_memfd(path));
    memfds.map(|path| fs::metadata(path).unwrap().blocks() as usize * 512).sum()
}

/// Not a test: what a rank's process runs, with its place in the environment.
#[test]
fn rank_process() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let stage: u8 = std::env::var(STAGE).unwrap().parse().unwrap();
    let socket = std::env::var(SOCKET).unwrap();
    let (mapped, heap) = measure(stage.try_into().unwrap(), rank.parse().unwrap(), &socket);
    println!("\nheld {mapped} {heap}");
}

fn run_world(stage: Stage) -> Vec<(usize, usize)> {
    let folder = std::env::temp_dir().join(format!("oxizero-mapped-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let spawn = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(STAGE, u8::from(stage).to_string())
            .env(SOCKET, folder.join(format!("stage{}", u8::from(stage))))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..RANKS).map(spawn).collect();
    let held = ranks.into_iter().map(|rank| {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", output.status);
        let text = String::from_utf8(output.stdout).unwrap();
        let held = text.lines().find_map(|line| line.strip_prefix("held ")).unwrap();
        let (mapped, heap) = held.split_once(' ').unwrap();
        (mapped.parse().unwrap(), heap.parse().unwrap())
    });
    let held = held.collect();
    fs::remove_dir_all(&folder).unwrap();
    held
}

#[test]
fn ranks_of_a_host_hold_one_copy_of_the_model_and_each_its_own_rest() {
    // By hand: bf16 weights once for both ranks (stage 3: a half each), an f32 accumulator a rank
    // (stages 2 and 3: of its half); on the heap f32 masters and two moments (stages 1-3: of the
    // half).
    let s = UNITS * NUMEL;
    for (stage, mapped, heap) in [
        (Stage::Zero0, 2 * s + 2 * 4 * s, 12 * s),
        (Stage::Zero1, 2 * s + 2 * 4 * s, 12 * s / 2),
        (Stage::Zero2, 2 * s + 2 * 4 * s / 2, 12 * s / 2),
        (Stage::Zero3, 2 * s + 2 * 4 * s / 2, 12 * s / 2),
    ] {
        for (found, found_heap) in run_world(stage) {
            assert!((mapped..mapped + CONTROL).contains(&found), "{stage:?}: {found} of {mapped}");
            assert_eq!(found_heap, heap, "{stage:?}");
        }
    }
}
