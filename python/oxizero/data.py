"""The loader that `initialize` makes of training data."""

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from oxizero._oxizero import ConfigError


class Epochs(DistributedSampler):
    """Gives another order each time it is iterated, without `set_epoch`, which says what the next
    order is that of."""

    def __iter__(self):
        order = super().__iter__()
        self.epoch += 1
        return order


def loader(training_data, collate_fn, config, arrangement):
    """A rank's loader of the data, or None where there is none."""
    if training_data is None:
        return None
    if config.micro_batch_size is None:
        raise ConfigError(
            "training_data needs `train_micro_batch_size_per_gpu` in the configuration"
        )
    sampler = None
    if not isinstance(training_data, IterableDataset):  # which says itself what a rank reads
        sampler = Epochs(
            training_data, num_replicas=arrangement.batch_ranks, rank=arrangement.batch_rank
        )
    return DataLoader(
        training_data,
        batch_size=config.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
    )
