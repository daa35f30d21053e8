"""Translation of LLM Foundry's pretraining YAMLs into ours. Imports no torch: `llmtrain migrate` answers at once."""
