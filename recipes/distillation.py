"""On-policy distillation from a teacher. Trains the embedded model; needs a --teacher_model_name_or_path."""

from trl_ext.runs.online import main
from trl_ext.trainers import DistillationConfig, DistillationTrainer

if __name__ == "__main__":
    main(DistillationConfig, DistillationTrainer)
