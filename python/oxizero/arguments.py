"""The command-line arguments that scripts for DeepSpeed take."""


def add_config_arguments(parser):
    """Adds `--deepspeed`, for the script's own use, and `--deepspeed_config`, which
    `initialize(args=...)` reads. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "a training configuration as DeepSpeed's")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="for the script's own use; initialize() does not look at it",
    )
    group.add_argument(
        "--deepspeed_config", metavar="FILE", help="the configuration, a JSON file"
    )
    return parser
