"""What the engine says of its configuration, by DeepSpeed's names."""


class Settings:
    """Methods of the engine."""

    def gradient_accumulation_steps(self):
        """Micro-batches in a window."""
        return self.config.accumulation

    def train_batch_size(self):
        """Samples of all ranks in one step; None where the configuration does not say."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self):
        """Samples of a rank's micro-batch; None where the configuration does not say."""
        return self.config.micro_batch_size

    def get_batch_info(self):
        """Samples of all ranks in one step, of a rank's micro-batch, and micro-batches in a
        window."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def zero_optimization_stage(self):
        """The ZeRO stage."""
        return self.config.stage

    def gradient_clipping(self):
        """The norm that gradients are clipped to in a step; 0.0 where they are not."""
        return self.config.gradient_clipping

    def fp16_enabled(self):
        """Whether the configuration makes the model float16."""
        return self.config.model_dtype == "float16"

    def bfloat16_enabled(self):
        """Whether the configuration makes the model bfloat16."""
        return self.config.model_dtype == "bfloat16"
