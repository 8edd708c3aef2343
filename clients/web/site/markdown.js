import{b as a}from"./chunk-DO7W7VSN.js";import"./chunk-C34DBRTJ.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
