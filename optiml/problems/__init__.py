"""Problems: what a right kernel must compute. One folder a built-in problem, nothing to register."""
