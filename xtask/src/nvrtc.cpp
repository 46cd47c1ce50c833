// Compiles CUDA C++ with NVRTC and prints what it has to say.
//
//   nvrtc ARCHITECTURE INCLUDE-FOLDER SOURCE...
#include <nvrtc.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

static bool compile(const std::string& architecture, const std::string& include,
                    const char* path) {
  std::ifstream file(path);
  const std::string source{std::istreambuf_iterator<char>(file), {}};
  if (source.empty()) {
    std::cerr << path << ": cannot be read\n";
    return false;
  }
  nvrtcProgram program;
  nvrtcResult result =
      nvrtcCreateProgram(&program, source.c_str(), path, 0, nullptr, nullptr);
  if (result != NVRTC_SUCCESS) {
    std::cerr << path << ": " << nvrtcGetErrorString(result) << "\n";
    return false;
  }
  const std::string target = "--gpu-architecture=" + architecture;
  const std::string folder = "--include-path=" + include;
  const char* options[] = {target.c_str(), folder.c_str(), "--std=c++17"};
  result = nvrtcCompileProgram(program, 3, options);
  size_t size = 0;
  nvrtcGetProgramLogSize(program, &size);
  std::string log(size, '\0');
  nvrtcGetProgramLog(program, &log[0]);
  // The size counts the null at the end.
  if (size > 1) std::cerr << log.c_str() << "\n";
  nvrtcDestroyProgram(&program);
  if (result == NVRTC_SUCCESS) return true;
  std::cerr << path << ": " << nvrtcGetErrorString(result) << "\n";
  return false;
}

int main(int count, char** arguments) {
  bool good = count > 3;
  for (int i = 3; i < count; i++) good &= compile(arguments[1], arguments[2], arguments[i]);
  return good ? 0 : 1;
}
