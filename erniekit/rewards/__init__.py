"""Score answers: rewards by name, by functions of users in processes of their own, and by reward models."""
