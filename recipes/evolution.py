"""Evolution strategies: learning from the rewards of perturbed policies. Trains the embedded model."""

from trl_ext.runs.online import main
from trl_ext.trainers import EvolutionConfig, EvolutionTrainer

if __name__ == "__main__":
    main(EvolutionConfig, EvolutionTrainer)
