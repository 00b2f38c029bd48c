"""A training script for DeepSpeed, as people have them; only its import was changed."""

import argparse
import json
import os

import torch

import oxizero as deepspeed


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x, y):
        hidden = deepspeed.checkpointing.checkpoint(lambda x: self.body(x).relu(), x)
        return torch.nn.functional.mse_loss(self.head(hidden), y)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=6)
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    args = arguments()
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    deepspeed.get_accelerator().set_device(deepspeed.comm.get_local_rank())
    torch.manual_seed(rank)
    model = Net()
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=1e-2)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, model_parameters=model.parameters()
    )
    deepspeed.utils.logger.info("training")
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 8).to(engine.device)
    losses = []
    for micro_step in range(args.steps * engine.gradient_accumulation_steps()):
        loss = engine(x, x.sum(1, keepdim=True))
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            grad = deepspeed.utils.safe_get_full_grad(engine.module.head.weight)
            assert grad.shape == (1, 16)
        engine.step()
        assert engine.micro_steps == micro_step + 1
        average = loss.detach().clone()
        deepspeed.comm.all_reduce(average)
        losses.append(average.item() / deepspeed.comm.get_world_size())
        if engine.global_rank == 0:
            print("step", engine.global_steps, scheduler.get_last_lr(), engine.get_lr())
    deepspeed.comm.barrier()
    deepspeed.utils.log_dist("saving", ranks=[0])
    if rank == 0:
        torch.save(engine.module.state_dict(), "model.pt")
        told = {
            "steps": [engine.global_steps, engine.skipped_steps, engine.global_samples],
            "lr": engine.get_lr()[0],
            "losses": losses,
            "world": deepspeed.comm.get_world_size(),
            "device": str(engine.device),
        }
        with open("told.json", "w") as file:
            json.dump(told, file)
    else:
        assert engine.local_rank == rank == int(os.environ["LOCAL_RANK"])


if __name__ == "__main__":
    main()
