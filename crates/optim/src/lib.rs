//! Optimizer update rules of the oxizero ZeRO engine
