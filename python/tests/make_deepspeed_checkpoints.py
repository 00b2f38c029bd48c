"""Makes the checkpoints of `deepspeed_checkpoints` anew, with DeepSpeed, which the tests do not
need. Beside each lies what DeepSpeed itself reads of it, and the losses with which it goes on."""

import json
import multiprocessing
import os
import pathlib
import shutil
import socket

from deepspeed_model import CASES, MORE_STEPS, STEPS, Net, adamw, batch

HERE = pathlib.Path(__file__).parent / "deepspeed_checkpoints"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(rank, case, port, folder):
    stage, dtype, groups, size = CASES[case]
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine = deepspeed.initialize(model=model, optimizer=adamw(model, groups), config=config)[0]

    def step(number):
        loss = engine(batch(number, rank))
        engine.backward(loss)
        engine.step()
        return loss.item()

    for number in range(STEPS):
        step(number)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "thing": torch.zeros(2)})
    # What it says of parameters in several groups fails on ranks that have nothing of a group.
    truth = {
        name: {"master": safe_get_full_fp32_param(param).tolist()}
        | {
            key: safe_get_full_optimizer_state(param, key).tolist()
            for key in ("exp_avg", "exp_avg_sq")
        }
        for name, param in engine.module.named_parameters()
        if param.requires_grad and groups == 1
    }
    losses = [step(number) for number in range(STEPS, STEPS + MORE_STEPS)]
    (folder / f"losses{rank}.json").write_text(json.dumps(losses))
    if rank == 0:
        (folder / "truth.json").write_text(json.dumps(truth))


def main():
    context = multiprocessing.get_context("spawn")
    for case, (*_, size) in CASES.items():
        folder, port = HERE / case, free_port()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        of_rank = [(rank, case, port, folder) for rank in range(size)]
        ranks = [context.Process(target=train, args=args) for args in of_rank]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        for script in folder.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
