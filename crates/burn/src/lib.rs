//! The burn front-end of the oxizero ZeRO engine
