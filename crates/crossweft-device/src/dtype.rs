//! Data types and reduce operations, with the numbers both sides of a launch agree on.

/// Element type of a message. The discriminants are part of the device ABI.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DataType {
    /// Signed 8-bit integer.
    I8 = 0,
    /// Unsigned 8-bit integer.
    U8 = 1,
    /// Signed 16-bit integer.
    I16 = 2,
    /// Unsigned 16-bit integer.
    U16 = 3,
    /// Signed 32-bit integer.
    I32 = 4,
    /// Unsigned 32-bit integer.
    U32 = 5,
    /// Signed 64-bit integer.
    I64 = 6,
    /// Unsigned 64-bit integer.
    U64 = 7,
    /// IEEE 754 binary16.
    F16 = 8,
    /// bfloat16.
    Bf16 = 9,
    /// IEEE 754 binary32.
    F32 = 10,
    /// IEEE 754 binary64.
    F64 = 11,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinity, largest 448 (OCP E4M3).
    F8E4M3 = 12,
    /// 8-bit float, 5 exponent and 2 mantissa bits, largest finite 57344 (OCP E5M2).
    F8E5M2 = 13,
}

impl DataType {
    /// Every data type, in the order of its number.
    pub const ALL: [Self; 14] = [
        Self::I8,
        Self::U8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Bytes of one element: 1, 2, 4 or 8.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// The name used in plans, tables and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }

    /// The data type of that [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The data type of that [`name`](Self::name), or of the one that torch, numpy or nccl-tests have for
    /// it.
    #[must_use]
    pub fn from_common_name(name: &str) -> Option<Self> {
        Some(match name {
            "float" | "float32" => Self::F32,
            "double" | "float64" => Self::F64,
            "half" | "float16" => Self::F16,
            "bfloat16" => Self::Bf16,
            "int8" => Self::I8,
            "uint8" => Self::U8,
            "int16" => Self::I16,
            "uint16" => Self::U16,
            "int32" => Self::I32,
            "uint32" => Self::U32,
            "int64" => Self::I64,
            "uint64" => Self::U64,
            "f8e4m3fn" | "float8_e4m3fn" => Self::F8E4M3,
            "float8_e5m2" => Self::F8E5M2,
            name => return Self::from_name(name),
        })
    }

    /// Whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2
        )
    }
}

impl core::fmt::Display for DataType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}

/// How elements of several ranks become one. The discriminants are part of the device ABI.
///
/// Integers wrap. Floats accumulate in f32 (f64 in f64) and are rounded to nearest even when
/// stored; 8-bit floats saturate to their largest finite value.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum.
    Sum = 0,
    /// Product.
    Prod = 1,
    /// Smallest; a number wins over a NaN.
    Min = 2,
    /// Largest; a number wins over a NaN.
    Max = 3,
    /// Sum divided by the number of ranks; integers truncate towards zero after a wrapping sum.
    Avg = 4,
}

impl ReduceOp {
    /// Every reduce operation, in the order of its number.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// The name used in plans, tables and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }

    /// The operation of that [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.name() == name)
    }
}

impl core::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}
