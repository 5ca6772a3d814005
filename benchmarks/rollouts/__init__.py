"""What training by reinforcement gains where each epoch's answers are drafted from the last one's."""
