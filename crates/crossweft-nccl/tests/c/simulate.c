/* Prints how long a group with one all-reduce of BYTES bytes between two ranks is predicted to take. */
#include "harness.h"

int main(int argc, char** argv) {
    ncclComm_t comms[2];
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    size_t bytes = argc > 1 ? (size_t)atol(argv[1]) : 0;
    float* data[2] = {calloc(1, bytes), calloc(1, bytes)};
    CHECK(data[0] && data[1]);
    OK(ncclCommInitAll(comms, 2, NULL));
    OK(ncclGroupStart());
    for (int r = 0; r < 2; r++)
        OK(ncclAllReduce(data[r], data[r], bytes / sizeof(float), ncclFloat32, ncclSum, comms[r], NULL));
    OK(ncclGroupSimulateEnd(&info));
    printf("%.9g\n", (double)info.estimatedTime);
    for (int r = 0; r < 2; r++) OK(ncclCommDestroy(comms[r]));
    return 0;
}
