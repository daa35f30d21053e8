"""What a finished run shows."""
def report(config, outcome, command_file, overrides, seconds): print(outcome.validation_loss)
